"""1.1: codes and scales against qwix, the published table, gguf-py, and arithmetic written out."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from peftlab import quant
from peftlab.quant import codebooks, encoding

# QLoRA (arXiv:2305.14314), appendix E, as printed.
pytestmark = pytest.mark.usefixtures('quick_compiles')

TABLE = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
  *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
  *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
  *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def form(name: str, ins: int, outs: tuple[int, ...], **options) -> quant.Form:
  words = ('in', *('out' for _ in outs))
  chosen = quant.get_quantizer(name)
  chosen = chosen.settled('cpu', chosen.tile or ins)
  return quant.Form(quantizer=chosen, words=words, shape=(ins, *outs), dtype='float32', **options)


def normal(*shape: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def encoded(name: str, w: jax.Array) -> quant.Quantized:
  of = form(name, w.shape[0], w.shape[1:])
  return quant.Quantized(encoding.encode(of, w), of)


def test_nf4_holds_the_published_table():
  w = jnp.asarray(TABLE, jnp.float32).reshape(16, 1) * 3
  held = encoded('nf4(tile=16, double=false)', w)
  np.testing.assert_array_equal(
    held.form.quantizer.unsigned(held.arrays['codes']).ravel(), np.arange(16)
  )
  np.testing.assert_allclose(held.matrix(), w, rtol=1e-6)
  assert codebooks.NORMAL_FLOAT == TABLE


QWIX = (
  ('int8', jnp.int8, 0),
  ('int8(tile=32)', jnp.int8, 32),
  ('int4(tile=32)', jnp.int4, 32),
  ('nf4(tile=32, double=false)', 'nf4', 32),
  ('mxfp4', 'mxfp4', 32),
  ('fp8_e4m3', jnp.float8_e4m3fn, 0),
  ('fp8_e5m2', jnp.float8_e5m2, 0),
)


@pytest.mark.parametrize(('name', 'qtype', 'tile'), QWIX, ids=[n for n, *_ in QWIX])
def test_values_agree_with_qwix(name, qtype, tile):
  w = normal(64, 24)
  tiled = {0: tile} if tile else {}
  theirs = qwix.quantize(w, qtype, channelwise_axes=(1,), tiled_axes=tiled)
  held = encoded(name, w)
  np.testing.assert_allclose(held.matrix(), qwix.dequantize(theirs), rtol=1e-6, atol=1e-7)


def test_a_qarray_is_taken_and_given():
  w = normal(64, 24)
  theirs = qwix.quantize(w, 'nf4', channelwise_axes=(1,), tiled_axes={0: 32})
  held = quant.from_qwix(theirs)
  np.testing.assert_allclose(held.matrix(), qwix.dequantize(theirs), rtol=1e-6)
  back = quant.to_qwix(held)
  np.testing.assert_array_equal(
    np.asarray(back.qvalue).astype(np.int8), np.asarray(theirs.qvalue).astype(np.int8)
  )
  np.testing.assert_array_equal(back.scale, theirs.scale)
  assert back.qtype == theirs.qtype
  with pytest.raises(ValueError, match='q4_1 has no form in qwix'):
    quant.to_qwix(encoded('q4_1', w))


# Bits per weight of a kernel [4096, 1024], written out.
BITS = {
  'int8': 8 + 32 / 4096,  # 8.008
  'int8(tile=64, scale_dtype=bfloat16)': 8 + 16 / 64,
  'int4': 4 + 32 / 64,
  'nf4': 4 + 8 / 64 + 32 / (64 * 256) + 32 / (4096 * 1024),  # 4.127
  'nf4(double=false)': 4 + 32 / 64,
  'nf4(tile=128)': 4 + 8 / 128 + 32 / (128 * 256) + 32 / (4096 * 1024),
  'fp8_e4m3': 8 + 32 / 4096,
  'mxfp4': 4.25,
  'q4_0': 4.5,
  'q4_1': 5.0,
  'q8_0': 8.5,
}


@pytest.mark.parametrize('name', BITS)
def test_bits_are_as_computed(name):
  of = form(name, 4096, (1024,))
  arrays = encoding.shapes(of)
  held = quant.Quantized(arrays, of)
  measured = 8 * sum(
    a.size * (4 if a.dtype == jnp.int4 else 8 * a.dtype.itemsize) // 8 for a in arrays.values()
  )
  assert measured / (4096 * 1024) == pytest.approx(BITS[name], abs=1e-9)
  assert held.form.bits == pytest.approx(BITS[name], abs=1e-9)


def test_the_published_figures():
  assert round(form('nf4', 4096, (4096,)).bits, 3) == 4.127
  assert round(form('int8', 4096, (4096,)).bits, 3) == 8.008


# On normal weights: nf4 of QLoRA's table at block 64 near 0.09, int8 per channel below 0.01.
@pytest.mark.parametrize(
  ('name', 'low', 'high'),
  (
    ('nf4', 0.08, 0.10),
    ('nf4(double=false)', 0.08, 0.10),
    ('int8', 0.0, 0.01),
    ('int4', 0.08, 0.13),
    ('fp8_e4m3', 0.02, 0.03),
    ('mxfp4', 0.09, 0.13),
  ),
)
def test_error_on_normal_weights(name, low, high):
  w = normal(256, 64)
  assert low < quant.error(w, encoded(name, w)) < high


def blocks(kind: str, rows: int, columns: int) -> np.ndarray:
  """Random but finite blocks of a GGUF type, uint8 [rows, blocks, bytes]."""
  size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
  random = np.random.default_rng(1)
  made = random.integers(0, 256, (rows, columns // size, nbytes), np.uint8)
  halves = {'Q4_0': (0,), 'Q4_1': (0, 2), 'Q8_0': (0,), 'Q4_K': (0, 2), 'Q6_K': (208,)}[kind]
  for at in halves:
    scale = random.uniform(0.01, 0.1, made.shape[:2]).astype(np.float16)
    made[..., at : at + 2] = scale[..., None].view(np.uint8)
  return made


GGUF = {'q4_0': 'Q4_0', 'q4_1': 'Q4_1', 'q8_0': 'Q8_0', 'q4_k': 'Q4_K', 'q6_k': 'Q6_K'}
GGUF_BITS = {'q4_0': 4.5, 'q4_1': 5.0, 'q8_0': 8.5, 'q4_k': 4.5, 'q6_k': 6.5625}


@pytest.mark.parametrize('name', GGUF)
def test_gguf_blocks_decode_as_in_gguf_py(name):
  raw = blocks(GGUF[name], 6, 512)
  expected = gguf.dequantize(raw.reshape(6, -1), gguf.GGMLQuantizationType[GGUF[name]])
  of = form(name, 512, (6,))
  arrays = {n: jnp.asarray(a) for n, a in of.quantizer.from_blocks(raw).items()}
  held = quant.Quantized(arrays, of)
  # One rounding less where multiplication and addition are one instruction.
  np.testing.assert_allclose(held.matrix(), expected.T, rtol=1e-6, atol=1e-6)
  assert held.form.bits == GGUF_BITS[name]
  bits = 8 * sum(
    a.size * (4 if a.dtype == jnp.int4 else 8 * a.dtype.itemsize) // 8 for a in arrays.values()
  )
  assert bits == 8 * raw.size  # the very bytes of the file, in another order


@pytest.mark.parametrize('name', ('q4_0', 'q4_1', 'q8_0'))
def test_gguf_types_are_made_as_gguf_py_makes_them(name):
  w = normal(64, 10)
  kind = gguf.GGMLQuantizationType[GGUF[name]]
  theirs = gguf.dequantize(gguf.quantize(np.asarray(w).T, kind), kind).T
  np.testing.assert_allclose(encoded(name, w).matrix(), theirs, rtol=1e-5, atol=1e-6)


def test_k_types_are_only_read():
  with pytest.raises(ValueError, match='q4_k is read from GGUF files only'):
    encoded('q4_k', normal(256, 4))


@pytest.mark.parametrize(
  ('given', 'message'),
  (
    ('nf5', "No quantizer 'nf5'; did you mean 'nf4'"),
    ('nf4(doubel=true)', "has no option 'doubel'; did you mean 'double'"),
    ('nf4(double=2)', 'has double=2; expected true or false'),
    ('nf4(tile=x)', 'has tile=x; expected a whole number'),
    ('nf4(tile=-1)', 'has tile=-1; expected a whole number, 0 or more'),
    ('nf4(tile=32.0)', 'has tile=32.0; expected a whole number, 0 or more'),
    ('int8(tile=64', "'int8(tile=64' has no closing parenthesis; expected NAME"),
    ('int8(', 'has no closing parenthesis'),
    ('int8(scale_dtype=float8)', "scale_dtype='float8'; did you mean 'float32'"),
    ('q4_1(tile=64)', 'has tile=64; this format knows 32 only'),
    (7, 'is a name or a Quantizer, given 7'),
  ),
)
def test_errors_name_what_was_given(given, message):
  with pytest.raises(ValueError, match=message.replace('(', r'\(')):
    quant.get_quantizer(given)


@pytest.mark.parametrize('name', ('nf4', 'int4', 'mxfp4', 'q4_0', 'q4_1'))
def test_codes_mean_the_same_as_int4_and_in_bytes(name):
  w = normal(64, 6, 4)
  first, second = (encoded(f'{name}(held={held})', w) for held in ('int4', 'bytes'))
  assert (first.arrays['codes'].dtype, second.arrays['codes'].dtype) == (jnp.int4, jnp.uint8)
  np.testing.assert_array_equal(first.matrix(), second.matrix())


def test_encoding_takes_a_quarter_of_the_matrix():
  for name in ('nf4', 'int8'):
    of = form(name, 1024, (512,))
    program = encoding._encoder(of, 0, None)
    w = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    memory = program.lower(w).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 1024 * 512 * 4 / 4, name


def test_slices_give_what_the_whole_gives():
  w = normal(512, 6, 32)
  for name in ('nf4', 'int8'):
    of = form(name, 512, (6, 32))
    held = encoding.encode(of, w)
    whole = of.quantizer.compress(of.quantizer.encode(of.to_tiles(w)))
    for key, array in held.items():
      np.testing.assert_allclose(
        np.asarray(array, np.float32), np.asarray(whole[key], np.float32), rtol=1e-6
      )

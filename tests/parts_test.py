"""Parts: split and merge are inverses on the same arrays; the byte meter; the identity check."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

import peftlab
from peftlab import _parts, testing
from peftlab.plugins.lora import LoRA


class Everything(nnx.Module):
  """One Variable of every kind, a plain array, a Variable held twice."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.linear = nnx.Linear(3, 2, rngs=rngs)
    self.again = self.linear.kernel
    self.factor = nnx.LoRAParam(jnp.ones((3,)))
    self.own = peftlab.AdapterParam(jnp.ones((4,)))
    self.frozen = peftlab.AdapterConstant(jnp.ones(()))
    self.angles = peftlab.Constant(jnp.arange(5.0))
    self.table = nnx.data(jnp.arange(6))
    self.cache = nnx.Cache(jnp.zeros((2,)))
    self.calls = nnx.BatchStat(jnp.zeros(()))
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.blocks = nnx.List([nnx.Linear(2, 2, use_bias=False, rngs=rngs) for _ in range(2)])


def shapes(tree):
  return jax.tree.map(jnp.shape, tree)


def test_the_type_of_a_variable_decides_where_it_goes():
  parts = peftlab.split(Everything())
  assert shapes(parts.adapter) == {'factor': (3,), 'frozen': (), 'own': (4,)}
  assert shapes(parts.base) == {
    'again': (3, 2),
    'angles': (5,),
    'blocks': {0: {'kernel': (2, 2)}, 1: {'kernel': (2, 2)}},
    'linear': {'bias': (2,)},
    'table': (6,),
  }
  assert shapes(parts.state) == {
    'cache': (2,),
    'calls': (),
    'dropout': {'rngs': {'count': (), 'key': ()}},
  }


def test_split_holds_the_very_arrays_of_the_model():
  model = Everything()
  parts = peftlab.split(model)
  held = {_parts.path_name(p): v.get_raw_value() for p, v in _parts.variables(model).items()}
  for name in ('adapter', 'base', 'state'):
    for path, array in _parts.flat(getattr(parts, name)).items():
      if path != ('table',):
        assert array is held[_parts.path_name(path)], path
  assert parts.base['table'] is model.table


def test_merge_is_the_inverse_of_split():
  model = Everything()
  parts = peftlab.split(model)
  back = peftlab.merge(parts)
  again = peftlab.split(back)
  assert again.graph == parts.graph
  assert hash(again.graph) == hash(parts.graph)
  for name in ('adapter', 'base', 'state'):
    old, new = getattr(parts, name), getattr(again, name)
    assert jax.tree.structure(old) == jax.tree.structure(new)
    assert all(a is b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
  assert back.again is back.linear.kernel, 'a Variable held twice became two'


# what -> (a change of the base {'kernel': ..., 'bias': ...}, the message)
WRONG_TREES = {
  'a misspelt key': (
    lambda base: {'kernel': base['kernel'], 'bais': base['bias']},
    r"lacks bias and has bais, which the graph does not know; did you mean 'bias'\?",
  ),
  'a missing key': (
    lambda base: {'kernel': base['kernel']},
    r'lacks bias\.',
  ),
  'one key too many': (
    lambda base: base | {'other': base['bias']},
    r'has other, which the graph does not know\.',
  ),
  'no tree': (
    lambda base: None,
    r'lacks bias, kernel and has <NoneType>, which the graph does not know\.',
  ),
}


@pytest.mark.parametrize('case', WRONG_TREES)
def test_merge_takes_the_arrays_of_its_graph_only(case):
  """nnx.merge itself goes by the order of the names, so another name is another array's place."""
  change, message = WRONG_TREES[case]
  parts = peftlab.split(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
  with pytest.raises(ValueError, match=f'^The base tree of these parts {message}$'):
    peftlab.merge(parts.replace(base=change(parts.base)))


def test_merge_takes_parts():
  with pytest.raises(ValueError, match=r'^merge takes Parts \(see split\), given Linear\.$'):
    peftlab.merge(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))


def test_a_merged_model_has_variables_of_its_own():
  model = Everything()
  back = peftlab.merge(peftlab.split(model))
  back.own[...] = jnp.zeros((4,))
  chex.assert_trees_all_equal(model.own[...], jnp.ones((4,)))


def test_parts_are_a_pytree_whose_graph_is_static():
  parts = peftlab.split(Everything())
  doubled = jax.tree.map(lambda a: a, parts)
  assert isinstance(doubled, peftlab.Parts)
  assert doubled.graph is parts.graph
  assert len(jax.tree.leaves(parts)) == 3 + 5 + 4 + 1
  assert parts.replace(adapter={}).base is parts.base


@pytest.mark.parametrize('thing', ({'a': 1}, jnp.ones(3), None))
def test_split_takes_a_module(thing):
  kind = type(thing).__name__
  with pytest.raises(ValueError, match=f'^split takes an nnx.Module, given {kind}.$'):
    peftlab.split(thing)


def test_trainable_is_false_for_constants_only():
  assert peftlab.trainable(peftlab.split(Everything())) == {
    'factor': True,
    'frozen': False,
    'own': True,
  }


def test_trainable_takes_parts():
  with pytest.raises(ValueError, match=r'^trainable takes Parts \(see split\), given Everything.$'):
    peftlab.trainable(Everything())


def test_flat_and_nest_are_inverses():
  tree = {'a': {'b': 1, 0: 2}, 'c': 3}
  assert _parts.flat(tree) == {('a', 'b'): 1, ('a', 0): 2, ('c',): 3}
  assert _parts.nest(_parts.flat(tree)) == tree
  assert _parts.path_name(('layers', 0, 'q')) == 'layers.0.q'


# Bytes by arithmetic: elements x bits / 8 x devices that hold a copy.
def _on(mesh, spec, shape, dtype=jnp.float32):
  return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))


BYTES = {
  'float32 on one device': (lambda mesh: jnp.zeros((4, 4)), 64),
  'bfloat16': (lambda mesh: jnp.zeros((4, 4), jnp.bfloat16), 32),
  'int4 takes half a byte': (lambda mesh: jnp.zeros((4, 4), jnp.int4), 8),
  'uint2 takes a quarter': (lambda mesh: jnp.zeros((4, 4), jnp.uint2), 4),
  'fp4': (lambda mesh: jnp.zeros((4, 4), jnp.float4_e2m1fn), 8),
  'bool': (lambda mesh: jnp.zeros((4, 4), bool), 16),
  'complex': (lambda mesh: jnp.zeros((4,), jnp.complex64), 32),
  'a key': (lambda mesh: jax.random.key(0), 8),
  'nothing': (lambda mesh: jnp.zeros((0, 4)), 0),
  'replicated: once per device': (lambda mesh: _on(mesh, P(), (4, 4)), 8 * 64),
  'sharded: once': (lambda mesh: _on(mesh, P('fsdp', 'tensor'), (4, 4)), 64),
  'sharded over half of the mesh': (lambda mesh: _on(mesh, P('fsdp'), (4, 4)), 2 * 64),
  'int4 sharded': (lambda mesh: _on(mesh, P('fsdp', 'tensor'), (8, 4), jnp.int4), 16),
  'a shape without array': (lambda mesh: jax.ShapeDtypeStruct((4, 4), jnp.bfloat16), 32),
  'a tree': (lambda mesh: {'a': jnp.zeros(3), 'b': [jnp.zeros(2), None]}, 20),
  'no arrays': (lambda mesh: {'a': 3, 'b': 'text'}, 0),
}


@pytest.mark.parametrize('case', BYTES)
def test_nbytes_counts_device_buffers_by_bit_width(case):
  make, expected = BYTES[case]
  assert peftlab.nbytes(make(testing.meshes()['fsdp4_tensor2'])) == expected


def test_nbytes_counts_one_array_once():
  array = jnp.zeros((4, 4))
  assert peftlab.nbytes([array, array, {'again': array}]) == 64
  assert peftlab.nbytes([array, array + 0]) == 128
  model = Everything()
  parts = peftlab.split(model)
  assert peftlab.nbytes(model) == peftlab.nbytes(parts) == peftlab.nbytes([parts, parts])


def test_assert_base_shared_counts_and_names():
  model = testing.StackModel()
  adapted, _ = peftlab.attach(model, LoRA(rank=2))
  assert peftlab.assert_base_shared(model, adapted) == '4/4'
  assert peftlab.assert_base_shared(model, peftlab.split(adapted)) == '4/4'
  assert peftlab.assert_base_shared(peftlab.split(model).base, adapted) == '4/4'
  parts = peftlab.split(adapted)
  copied = parts.replace(base=jax.tree.map(lambda a: a + 0, parts.base))
  with pytest.raises(
    AssertionError, match=r'4 of 4 base arrays are not shared: layers.down.bias, '
  ):
    peftlab.assert_base_shared(model, copied)
  del copied.base['layers']['up']
  with pytest.raises(AssertionError, match=r'layers.up.kernel'):
    peftlab.assert_base_shared(model, copied)


def test_assert_base_shared_shortens_a_long_list():
  before = {f'w{i:02d}': jnp.zeros(1) for i in range(12)}
  with pytest.raises(AssertionError, match=r'12 of 12 .*: w00, .*w07 and 4 more.$'):
    peftlab.assert_base_shared(before, {})

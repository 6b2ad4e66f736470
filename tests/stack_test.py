"""Stacks: shapes as literal trees, stack axis 0 and 1, nested stacks, metadata; bad input."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs, _stack
from peftlab.plugins.lora import LoRA
from peftlab.testing.models import Block

pytestmark = pytest.mark.usefixtures('quick_compiles')


def shapes(tree):
  return jax.tree.map(jnp.shape, tree)


def block(rngs):
  return Block((16, 24), rngs=rngs)


def test_a_stack_has_a_layer_axis_in_every_array():
  assert shapes(peftlab.split(peftlab.stack(block, 3, rngs=0)).base) == {
    'up': {'kernel': (3, 16, 24), 'bias': (3, 24)},
    'down': {'kernel': (3, 24, 16), 'bias': (3, 16)},
  }
  assert shapes(peftlab.split(peftlab.stack(block, 3, rngs=0, axis=1)).base) == {
    'up': {'kernel': (16, 3, 24), 'bias': (24, 3)},
    'down': {'kernel': (24, 3, 16), 'bias': (16, 3)},
  }


def test_stacks_nest():
  class Group(nnx.Module):
    def __init__(self, rngs):
      self.layers = peftlab.stack(block, 2, rngs=rngs, axis=1)
      self.norm = nnx.Param(jnp.ones((16,)), axes=('embed',))

  model = peftlab.stack(Group, 3, rngs=0, name='blocks')
  assert shapes(peftlab.split(model).base) == {
    'layers': {
      'up': {'kernel': (3, 16, 2, 24), 'bias': (3, 24, 2)},
      'down': {'kernel': (3, 24, 2, 16), 'bias': (3, 16, 2)},
    },
    'norm': (3, 16),
  }
  kernel = model.layers.up.kernel.get_metadata()
  assert (kernel['stack'], kernel['axes']) == ((0, 2), ('blocks', 'embed', 'layers', 'mlp'))
  assert model.norm.get_metadata()['axes'] == ('blocks', 'embed')


def test_every_layer_is_made_with_a_key_of_its_own():
  kernels = np.asarray(peftlab.stack(block, 4, rngs=0).up.kernel[...])
  assert len({k.tobytes() for k in kernels}) == 4
  again = peftlab.stack(block, 4, rngs=0).up.kernel[...]
  np.testing.assert_array_equal(kernels, again)
  assert not np.array_equal(kernels, peftlab.stack(block, 4, rngs=1).up.kernel[...])


@pytest.mark.parametrize('rngs', (0, jax.random.key(0)), ids=('seed', 'key'))
def test_a_seed_and_its_key_are_the_same(rngs):
  expected = peftlab.stack(block, 2, rngs=jax.random.key(0)).up.kernel[...]
  np.testing.assert_array_equal(peftlab.stack(block, 2, rngs=rngs).up.kernel[...], expected)


def test_rngs_are_drawn_from_their_params_stream_once():
  rngs = nnx.Rngs(0)
  first, second = (peftlab.stack(block, 2, rngs=rngs).up.kernel[...] for _ in range(2))
  assert not np.array_equal(first, second)


def test_lengths_0_and_1_and_negative():
  assert peftlab.stack(block, 0, rngs=0).up.kernel.shape == (0, 16, 24)
  assert peftlab.stack(block, 1, rngs=0).up.kernel.shape == (1, 16, 24)
  with pytest.raises(ValueError, match=r'^A stack cannot have -1 layers.$'):
    peftlab.stack(block, -1, rngs=0)


@pytest.mark.parametrize('axis', (0, 1))
def test_the_metadata_of_one_layer_is_that_of_a_layer_alone(axis):
  stacked = _stack.stacked(peftlab.split(peftlab.stack(block, 3, rngs=0, axis=axis)), axis=0)
  assert stacked.length == 3
  assert {_parts.path_name(p): a for p, a in stacked.axes['base'].items()} == dict.fromkeys(
    ('up.kernel', 'up.bias', 'down.kernel', 'down.bias'), axis
  )
  layer = peftlab.merge(
    peftlab.Parts(stacked.graph, {}, *jax.tree.map(lambda _: 0, _trees(stacked)))
  )
  assert layer.up.kernel.get_metadata()['axes'] == ('embed', 'mlp')
  assert layer.up.kernel.get_metadata()['stack'] == ()


def _trees(stacked):
  return [_parts.nest(dict.fromkeys(stacked.axes[n], 0)) for n in ('base', 'state')]


# stack axes of a kernel of rank 2, rank of an array -> where they go in it
PLACES = {
  ((0,), 2): (0,),
  ((1,), 2): (1,),
  ((1,), 1): (1,),
  ((1,), 0): (0,),
  ((2,), 0): (0,),
  ((0, 1), 2): (0, 1),
  ((0, 2), 2): (0, 2),
  ((0, 2), 1): (0, 2),
  ((0, 2), 0): (0, 1),
  ((2, 0), 0): (1, 0),
  ((), 2): (),
}


@pytest.mark.parametrize('case', PLACES, ids=str)
def test_layer_axes_go_where_the_kernels_are_or_last(case):
  assert _stack.place_axes(*case) == PLACES[case]


def test_insert_puts_things_at_indices_of_the_result():
  assert _stack.insert((1, 2), (0,), ('n',)) == ('n', 1, 2)
  assert _stack.insert((1, 2), (2,), ('n',)) == (1, 2, 'n')
  assert _stack.insert((1, 2), (2, 0), ('b', 'a')) == ('a', 1, 'b', 2)


def variable(shape, **metadata):
  return nnx.Param(jnp.zeros(shape), **metadata)


# (variable, rank and shape of one layer's weight) -> axes that count layers
FOUND = {
  'said': (variable((3, 4, 5), stack=(1,)), (3, 5), (1,)),
  'by name': (variable((3, 3, 3), axes=('embed', 'layers', 'mlp')), (3, 3), (1,)),
  'by shape': (variable((7, 4, 5)), (4, 5), (0,)),
  'by shape, in the middle': (variable((4, 7, 5)), (4, 5), (1,)),
  'two': (variable((2, 3, 4, 5)), (4, 5), (0, 1)),
  'none': (variable((4, 5)), (4, 5), ()),
}


@pytest.mark.parametrize('case', FOUND)
def test_the_layer_axes_of_any_stack_are_found(case):
  held, shape, expected = FOUND[case]
  assert _stack.stack_axes(held, 2, shape, 'w') == expected


UNTOLD = {
  'equal sizes': (variable((4, 4, 4)), 2, (4, 4), 'which axis counts layers cannot be told'),
  'other sizes': (variable((3, 4, 6)), 2, (4, 5), 'which axis counts layers cannot be told'),
  'no shape': (variable((3, 4, 5)), 2, None, 'one layer has rank 2: which axis'),
  'too few': (variable((4,)), 2, (4, 5), r'w has a weight of shape \(4,\); its layer uses 2'),
}


@pytest.mark.parametrize('case', UNTOLD)
def test_what_cannot_be_told_is_an_error_that_says_what_to_do(case):
  held, rank, shape, message = UNTOLD[case]
  with pytest.raises(ValueError, match=message):
    _stack.stack_axes(held, rank, shape, 'w')


def test_flax_stacks_are_adapted_as_they_are():
  """nnx.vmap over layers, with and without partition metadata, at stack axis 0 and 1."""
  for axis in (0, 1):
    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda r: nnx.Linear(4, 6, rngs=r), out_axes=axis))
    model, report = peftlab.attach(make(nnx.Rngs(0)), LoRA(rank=2))
    assert report.rows[0].layers == 3
    assert model.adapters[0].a.shape == ((3, 4, 2) if axis == 0 else (4, 3, 2))
    assert model.adapters[0].b.shape == ((3, 2, 6) if axis == 0 else (2, 3, 6))


def test_placing_a_stack_never_shards_its_layer_axis():
  mesh = _specs.make_mesh({'fsdp': 4, 'tensor': 2})
  for axis in (0, 1):
    model, dropped = _specs.place(peftlab.stack(block, 4, rngs=0, axis=axis), mesh)
    spec = model.up.kernel[...].sharding.spec
    assert tuple(spec) == ((None, 'fsdp', 'tensor') if axis == 0 else ('fsdp', None, 'tensor'))
    assert dropped == []

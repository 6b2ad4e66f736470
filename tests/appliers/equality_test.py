"""Law 6: sequential = scan in outputs and adapter gradients, for any stack and remat policy."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import testing
from peftlab.appliers import Scan, Sequential, get_applier, remat
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from peftlab.testing.models import Block

pytestmark = pytest.mark.usefixtures('quick_compiles')

D = 16
X = jax.random.normal(jax.random.key(1), (4, D))
LENGTHS = (1, 2, 5)


def run(layer, x):
  return layer(x)


class Local(nnx.Module):
  """5 local layers in a stack of their own, then 1 global layer."""

  def __init__(self, rngs, applier):
    self.local = peftlab.stack(lambda r: Block(rngs=r), 5, rngs=rngs)
    self.whole = Block(rngs=rngs)
    self.applier = applier

  def __call__(self, x):
    x, self.local = self.applier.run(self.local, x, run)
    return jnp.tanh(self.whole(x))


class Nested(nnx.Module):
  """Blocks of 5 + 1 layers, and the layers that do not fill a block: 15 = 2 * 6 + 3."""

  def __init__(self, outer, inner):
    self.blocks = peftlab.stack(lambda r: Local(r, inner), 2, rngs=0)
    self.rest = peftlab.stack(lambda r: Block(rngs=r), 3, rngs=1)
    self.applier = outer

  def __call__(self, x):
    x, self.blocks = self.applier.run(self.blocks, x, run)
    x, self.rest = self.applier.run(self.rest, x, run)
    return x


def by_hand(stack, x, length):
  """The layers of a stack one after the other, their arrays sliced with numpy."""
  parts = peftlab.split(stack)
  for i in range(length):
    layer = {n: jax.tree.map(lambda a, i=i: a[i], getattr(parts, n)) for n in ('base', 'adapter')}
    up, down = layer['base']['up'], layer['base']['down']
    x = x + np.tanh(x @ up['kernel'] + up['bias'][None]) @ down['kernel'] + down['bias'][None]
  return x


@pytest.mark.parametrize('length', LENGTHS)
@pytest.mark.parametrize('applier', (Scan(), Scan(unroll=2), Sequential()), ids=str)
def test_a_stack_is_its_layers_one_after_the_other(applier, length):
  model = testing.StackModel(length=length, applier=applier)
  cases.assert_close(model(X), by_hand(model.layers, X, length), str(applier), tolerance=1e-6)


@pytest.mark.parametrize('applier', (Scan(), Sequential(), Scan(remat='full')), ids=str)
def test_no_layers_give_the_input_back(applier):
  layers = peftlab.stack(lambda r: Block(rngs=r), 0, rngs=0)
  y, after = applier.run(layers, X, run)
  assert y is X
  assert after is layers
  y, created = applier.apply(peftlab.split(layers), X, run)
  assert y is X
  assert created.gone == ()


@pytest.fixture(scope='module')
def plain():
  """(parts, outputs, loss, gradients) under sequential without remat."""
  return _results(testing.StackModel(length=3, applier='sequential'))


def _results(model):
  model, _ = peftlab.attach(model, LoRA(rank=2))
  parts = cases.randomized(peftlab.split(model))
  return (parts, *cases.outputs_and_gradients(parts, X))


def _assert_same(got, expected):
  _, y, loss, gradients = got
  cases.assert_close(y, expected[1], 'outputs')
  cases.assert_close(loss, expected[2], 'loss')
  assert gradients.keys() == expected[3].keys()
  for path, gradient in gradients.items():
    cases.assert_close(gradient, expected[3][path], peftlab._parts.path_name(path))


@pytest.mark.parametrize(
  'applier',
  (Scan(), *(Scan(remat=p) for p in remat.POLICIES), Sequential(remat='full')),
  ids=str,
)
def test_remat_changes_no_output_and_no_gradient(applier, plain):
  _assert_same(_results(testing.StackModel(length=3, applier=applier)), plain)


@pytest.mark.parametrize('axis', (0, 1))
@pytest.mark.parametrize('applier', ('scan', 'sequential'))
def test_the_stack_axis_changes_no_output_and_no_gradient(applier, axis, plain):
  model = testing.StackModel(length=3, axis=axis, applier=applier)
  parts = peftlab.split(peftlab.attach(model, LoRA(rank=2))[0])

  def at(array):
    return min(axis, array.ndim - 1)

  moved = jax.tree.map(lambda a: jnp.moveaxis(a, 0, at(a)), plain[0].adapter)
  chex.assert_trees_all_equal_shapes(moved, parts.adapter)
  got = cases.outputs_and_gradients(parts.replace(adapter=moved), X)
  back = {path: jnp.moveaxis(g, at(g), 0) for path, g in got[2].items()}
  _assert_same((None, got[0], got[1], back), plain)


@pytest.mark.parametrize('appliers', (('scan', 'scan'), ('sequential', 'scan')))
def test_nested_stacks_are_the_same_under_every_applier(appliers, nested):
  got = _results(Nested(*map(get_applier, appliers)))
  _assert_same(got, nested)


@pytest.fixture(scope='module')
def nested():
  return _results(Nested(Sequential(), Sequential()))


def test_every_layer_of_nested_stacks_has_its_adapter():
  _, report = peftlab.attach(Nested(Scan(), Scan()), LoRA(rank=2))
  assert {row.path: (row.layers, row.slots['a']) for row in report.rows} == {
    'blocks.local.down': (10, (2, 5, 24, 2)),
    'blocks.local.up': (10, (2, 5, 16, 2)),
    'blocks.whole.down': (2, (2, 24, 2)),
    'blocks.whole.up': (2, (2, 16, 2)),
    'rest.down': (3, (3, 24, 2)),
    'rest.up': (3, (3, 16, 2)),
  }
  assert report.coverage == 1.0


def test_the_carry_is_a_tree_whose_arrays_keep_their_dtypes():
  layers = testing.StackModel(dtype=jnp.bfloat16).layers
  x = {'x': X.astype(jnp.bfloat16), 'loss': jnp.zeros((), jnp.float32)}

  def body(layer, carry):
    y = layer(carry['x'])
    return {'x': y.astype(jnp.float32), 'loss': carry['loss'] + jnp.mean(y.astype(jnp.float32))}

  for applier in (Scan(), Sequential()):
    y, _ = applier.run(layers, x, body)
    assert (y['x'].dtype, y['loss'].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize('applier', (Scan(), Sequential()), ids=str)
def test_a_carry_of_another_shape_is_refused(applier):
  layers = testing.StackModel().layers
  with pytest.raises(ValueError, match=r'A layer turned a carry of shapes \(4, 16\) into \(4, 8\)'):
    applier.run(layers, X, lambda layer, x: layer(x)[:, :8])


BAD = {
  'policy': (lambda: Scan(remat='ful'), "No remat policy 'ful'; did you mean 'full'?"),
  'policy of sequential': (lambda: Sequential(remat='all'), "No remat policy 'all'"),
  'unroll': (lambda: Scan(unroll=0), r'Scan\(unroll=0\): it must be at least 1.'),
  'name': (lambda: get_applier('scna'), "No applier 'scna'; did you mean 'scan'?"),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_fields_are_refused_with_the_nearest(case):
  make, message = BAD[case]
  with pytest.raises(ValueError, match=message):
    make()

"""What layers change while they run: counters, sown values, rngs, caches; their context."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts
from peftlab.appliers import Scan, Sequential

pytestmark = pytest.mark.usefixtures('quick_compiles')

D, LENGTH = 4, 3
X = jnp.ones((2, D))
APPLIERS = (Scan(), Sequential(), Scan(remat='full'), Sequential(remat='full'))
each_applier = pytest.mark.parametrize('applier', APPLIERS, ids=str)


class Counting(nnx.Module):
  """Counts its calls and keeps what it saw in a tuple that grows, as `sow` does."""

  def __init__(self, rngs):
    self.w = nnx.Param(jax.random.normal(rngs.params(), (D,)))
    self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

  def __call__(self, x):
    self.calls[...] += 1
    sown = self.seen.get_value() if hasattr(self, 'seen') else ()
    self.seen = nnx.Intermediate((*sown, x[0, 0]))
    return x + 1


class Inner(nnx.Module):
  """A stack of Counting in every layer of a stack."""

  def __init__(self, rngs, applier):
    self.layers = peftlab.stack(Counting, 2, rngs=rngs)
    self.applier = applier

  def __call__(self, x):
    x, self.layers = self.applier.run(self.layers, x, lambda layer, x: layer(x))
    return x


def run(layer, x):
  return layer(x)


@each_applier
def test_a_counter_counts_through_nested_stacks(applier):
  layers = peftlab.stack(lambda r: Inner(r, applier), LENGTH, rngs=0)
  for _ in range(2):
    y, layers = applier.run(layers, X, run)
  np.testing.assert_array_equal(layers.layers.calls[...], np.full((LENGTH, 2), 2))
  np.testing.assert_array_equal(y, X + 2 * LENGTH)


@each_applier
def test_a_sown_tuple_grows_and_is_stacked_in_layer_order(applier):
  layers = peftlab.stack(Counting, LENGTH, rngs=0)
  _, layers = applier.run(layers, X, run)
  _, layers = applier.run(layers, X * 10, run)
  first, second = layers.seen.get_value()
  np.testing.assert_array_equal(first, [1, 2, 3])
  np.testing.assert_array_equal(second, [10, 11, 12])


class Noisy(nnx.Module):
  """Dropout by flax's own rng streams."""

  def __init__(self, rngs):
    self.w = nnx.Param(jnp.zeros((D,)))
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=rngs.params()))

  def __call__(self, x):
    return x + self.dropout(jnp.ones_like(x))


@each_applier
def test_every_layer_and_call_draws_its_own_dropout(applier):
  layers = peftlab.stack(Noisy, LENGTH, rngs=0)
  masks = []
  for _ in range(2):
    carry = (jnp.zeros((LENGTH, 8, D)), jnp.zeros((), jnp.int32))

    def body(layer, carry):
      found, index = carry
      return found.at[index].set(layer(jnp.zeros((8, D)))), index + 1

    (found, _), layers = applier.run(layers, carry, body)
    masks += list(np.asarray(found))
  assert len({mask.tobytes() for mask in masks}) == 2 * LENGTH
  assert {0.0, 2.0} == set(np.unique(masks))
  np.testing.assert_array_equal(layers.dropout.rngs.count[...], [2] * LENGTH)


def test_scan_and_sequential_draw_the_same_dropout():
  layers = [peftlab.stack(Noisy, LENGTH, rngs=0) for _ in range(2)]
  first, second = (a.run(m, X, run)[0] for a, m in zip((Scan(), Sequential()), layers, strict=True))
  np.testing.assert_array_equal(first, second)


class Cached(nnx.Module):
  """Writes what it is given into its cache, at the position it is given."""

  def __init__(self, rngs):
    del rngs
    self.w = nnx.Param(jnp.zeros((D,)))
    self.cache = nnx.Cache(jnp.zeros((5,)))

  def __call__(self, x, position, mask, extra):
    self.cache[...] = self.cache[...].at[position].set(x[0, 0])
    assert extra is None
    return jnp.where(mask, x + 1, x)


@each_applier
def test_context_reaches_every_layer_and_caches_come_back_in_layer_order(applier):
  layers = peftlab.stack(Cached, LENGTH, rngs=0)

  def body(layer, x, *context):
    return layer(x, *context)

  mask = jnp.array([[True, True, False, False]])
  for position in (0, 3):
    y, layers = applier.run(layers, X, body, jnp.int32(position), mask, None)
  np.testing.assert_array_equal(layers.cache[...][:, 3], [1, 2, 3])
  np.testing.assert_array_equal(layers.cache[...][:, 1], [0, 0, 0])
  np.testing.assert_array_equal(y[0], [4, 4, 1, 1])


@each_applier
def test_context_that_is_no_array_stays_what_it_is(applier):
  """A flag of Python steers the trace, under remat too."""
  layers = peftlab.stack(Counting, LENGTH, rngs=0)

  def body(layer, x, double, word):
    assert word == 'word'
    return layer(x) * 2 if double else layer(x)

  y, _ = applier.run(layers, X, body, False, 'word')
  np.testing.assert_array_equal(y, X + LENGTH)


@each_applier
def test_state_that_a_body_creates_gets_out(applier):
  def body(layer, x):
    if not hasattr(layer, 'cache'):
      layer.cache = nnx.Cache(jnp.zeros((2, D)))
    layer.cache[...] = layer.cache[...] + x
    return layer(x)

  layers = peftlab.stack(Counting, LENGTH, rngs=0)
  _, after = applier.run(layers, X, body)
  np.testing.assert_array_equal(after.cache[...][:, 0, 0], [1, 2, 3])
  _, again = applier.run(after, X, body)
  assert again is after
  np.testing.assert_array_equal(after.cache[...][:, 0, 0], [2, 4, 6])


@each_applier
def test_a_run_that_creates_nothing_gives_the_same_module_back(applier):
  layers = peftlab.stack(Noisy, LENGTH, rngs=0)
  before = peftlab.split(layers)
  _, after = applier.run(layers, X, run)
  assert after is layers
  assert peftlab.split(after).graph == before.graph
  assert peftlab.assert_base_shared(before, after) == '1/1'


@each_applier
def test_the_layers_state_changes_under_jit(applier):
  layers = peftlab.stack(Counting, LENGTH, rngs=0)
  parts = peftlab.split(layers)
  run_it = jax.jit(lambda parts, x: applier.apply(parts, x, run)[1].state[('calls',)])
  np.testing.assert_array_equal(run_it(parts, X), [1] * LENGTH)
  np.testing.assert_array_equal(parts.state['calls'], [0] * LENGTH)


@each_applier
def test_gradients_flow_to_x_and_to_what_is_trained_only(applier):
  class Scaled(nnx.Module):
    def __init__(self, rngs):
      self.w = nnx.Param(jax.random.normal(rngs.params(), (D, D)))
      self.a = nnx.LoRAParam(jnp.ones((D,)))

    def __call__(self, x):
      return jnp.tanh(x @ self.w[...]) * self.a[...].reshape(1, -1)

  parts = peftlab.split(peftlab.stack(Scaled, LENGTH, rngs=0))

  def loss(a, x):
    return jnp.sum(applier.apply(parts.replace(adapter=a), x, run)[0])

  by_a, by_x = jax.grad(loss, (0, 1))(parts.adapter, X)
  expected = _gradients(np.asarray(parts.base['w']))
  chex.assert_trees_all_close(by_a['a'], expected[0], rtol=1e-4, atol=1e-6)
  chex.assert_trees_all_close(by_x, expected[1], rtol=1e-4, atol=1e-6)


def _gradients(w):
  """Of sum(y) for y = tanh(x W) a, layer by layer backwards, with a = 1, in numpy."""
  xs = [np.asarray(X, np.float64)]
  for i in range(LENGTH):
    xs.append(np.tanh(xs[-1] @ w[i]))
  dy = np.ones_like(xs[-1])
  by_a = []
  for i in reversed(range(LENGTH)):
    by_a.insert(0, (dy * xs[i + 1]).sum(0))
    dy = (dy * (1 - xs[i + 1] ** 2)) @ w[i].T
  return np.array(by_a, np.float32), dy.astype(np.float32)


def _two_lengths():
  parts = peftlab.split(peftlab.stack(Counting, LENGTH, rngs=0))
  return parts.replace(state={'calls': jnp.zeros((2,), jnp.int32)})


def _scalar():
  module = nnx.Module()
  module.w = nnx.Param(jnp.zeros(()))
  return module


BAD = {
  'lengths': (
    lambda: _parts.merge(_two_lengths()),
    r'The layers of a stack must be equally many: \w+ has 3, \w+ has 2',
  ),
  'nothing': (nnx.Module, 'must be equally many: it has no array'),
  'a scalar': (_scalar, r'w of shape \(\) has no layer axis'),
}


@pytest.mark.parametrize('case', BAD)
@pytest.mark.parametrize('applier', APPLIERS[:2], ids=str)
def test_what_is_no_stack_is_refused(applier, case):
  make, message = BAD[case]
  with pytest.raises(ValueError, match=message):
    applier.run(make(), X, run)

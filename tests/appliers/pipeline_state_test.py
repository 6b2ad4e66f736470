"""State, context and what bodies create, in a pipeline: as under scan on each microbatch."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab.appliers import Pipeline, Scan, absorb
from tests.appliers import pipelines

pytestmark = pytest.mark.usefixtures('quick_compiles')

D, ROWS = 4, 8
X = jax.random.normal(jax.random.key(1), (ROWS, D))
CIRCULAR = Pipeline(microbatches=4, repeats=2)
BESIDE = Pipeline(microbatches=2, rest='last')
PADDED = Pipeline(microbatches=2, rest='pad')


def run_staged(pipeline, layers, x, body, *context):
  """(y, {'adapter', 'base', 'state': arrays in layer order}) on 2 stages."""
  mesh = pipelines.mesh(2)
  with jax.set_mesh(mesh):
    laid = peftlab.split(pipeline.lay_out(layers))
    y, created = jax.jit(lambda parts, x, *c: pipeline.apply(parts, x, body, *c))(laid, x, *context)
    after = absorb(laid, created)
  natural = Scan().lay_out(peftlab.merge(after))
  return y, peftlab.split(natural), laid, after


def run_scanned(layers, x, body, *context, microbatches=1, whole=()):
  """Scan on one microbatch after the other: what a pipeline must equal."""
  ys = []
  for i in range(microbatches):
    rows = [
      c[i::microbatches] if hasattr(c, 'shape') and c.shape[:1] == (ROWS,) and j not in whole else c
      for j, c in enumerate(context)
    ]
    y, layers = Scan().run(layers, x[i::microbatches], body, *rows)
    ys.append(y)
  return jnp.stack(ys, 1).reshape(x.shape), peftlab.split(layers)


class Busy(nnx.Module):
  """Counts its calls, draws dropout, and reads everything it is given."""

  def __init__(self, rngs):
    self.w = nnx.Param(jax.random.normal(rngs.params(), (D,)))
    self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=rngs.params()))

  def __call__(self, x, rows, shared, table, word):
    assert word == 'word'
    self.calls[...] += 1
    y = self.dropout(jnp.tanh(x * self.w[...][None]))
    return y + rows[:, None] + shared + jnp.sum(table)


@pytest.mark.parametrize('pipeline', (CIRCULAR, BESIDE, PADDED), ids=str)
def test_state_rng_and_context_are_as_under_scan_on_each_microbatch(pipeline):
  """Dropout masks too: each layer and microbatch draws its own, from the layer's own stream."""
  length = 4 if pipeline is CIRCULAR else 3
  context = (jnp.arange(8.0), jnp.ones((1, D)), jnp.arange(3.0))
  pipeline = Pipeline(**vars(pipeline) | {'whole': (2,)})

  def body(layer, *given):
    return layer(*given, 'word')

  layers = peftlab.stack(Busy, length, rngs=0)
  y, after, _, _ = run_staged(pipeline, layers, X, body, *context)
  count = pipeline.microbatches
  if pipeline.rest == 'last':  # the last layer is outside of the stages: the whole batch at once
    np.testing.assert_array_equal(after.state['calls'], [2, 2, 1])
    return
  expected, state = run_scanned(layers, X, body, *context, microbatches=count, whole=(2,))
  chex.assert_trees_all_close(y, expected, rtol=1e-5)
  np.testing.assert_array_equal(after.state['calls'], [count] * length)
  counts = after.state['dropout']['rngs']['count']
  np.testing.assert_array_equal(counts, state.state['dropout']['rngs']['count'])
  assert len(np.unique(np.asarray(y))) > X.size / 2


def test_one_microbatch_draws_the_dropout_of_scan():
  layers = peftlab.stack(Busy, 4, rngs=0)
  context = (jnp.zeros(8), jnp.zeros((1, D)), jnp.zeros(3))

  def body(layer, *given):
    return layer(*given, 'word')

  y, _, _, _ = run_staged(Pipeline(repeats=2), layers, X, body, *context)
  expected, _ = Scan().run(peftlab.stack(Busy, 4, rngs=0), X, body, *context)
  chex.assert_trees_all_close(y, expected, rtol=1e-6)


class Cached(nnx.Module):
  """Writes its rows into its cache, and sows a mean and the rows."""

  def __init__(self, rngs):
    del rngs
    self.w = nnx.Param(jnp.zeros((D,)))
    self.cache = nnx.Cache(jnp.zeros((3, ROWS)), axes=('length', 'batch'))

  def __call__(self, x):
    self.cache[...] = self.cache[...].at[1].add(x[:, 0])
    self.rows = nnx.Intermediate(x[:, :2])
    self.mean = nnx.Intermediate(jnp.mean(x))
    return x + 1


@pytest.mark.parametrize('pipeline', (CIRCULAR, BESIDE), ids=str)
def test_rows_of_caches_and_of_sown_values_are_put_together(pipeline):
  length = 4 if pipeline is CIRCULAR else 3
  layers = peftlab.stack(Cached, length, rngs=0)
  y, after, _, _ = run_staged(pipeline, layers, X, lambda layer, x: layer(x))
  chex.assert_trees_all_close(y, X + length, rtol=1e-6)
  each = X[None] + jnp.arange(float(length)).reshape(-1, 1, 1)
  chex.assert_trees_all_close(after.state['cache'][:, 1], each[:, :, 0], rtol=1e-6)
  chex.assert_trees_all_close(after.state['rows'], each[:, :, :2], rtol=1e-6)
  chex.assert_trees_all_close(after.state['mean'], jnp.mean(each, (1, 2)), rtol=1e-5)


class Dense(nnx.Module):
  """x + x W + n."""

  def __init__(self, rngs):
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), (D, D)) * 0.1, axes=('embed', 'mlp'))
    self.bias = nnx.Param(jnp.ones((D,)))
    self.rngs = nnx.Rngs(params=rngs.params())

  def __call__(self, x):
    return x + x @ self.kernel[...] + self.bias[...].reshape(1, -1)


def add_factors(layer, x):
  """What qwix's LoRA does: the factors are made in the forward pass, from the layer's own rng."""
  if not hasattr(layer, 'a'):
    layer.a = nnx.LoRAParam(jax.random.normal(layer.rngs.params(), (D, 2)))
    layer.b = nnx.LoRAParam(jnp.zeros((2, D)))
  return layer(x) + x @ layer.a[...] @ layer.b[...]


@pytest.mark.parametrize('pipeline', (CIRCULAR, BESIDE), ids=str)
def test_created_factors_get_out_with_the_values_of_scan(pipeline):
  length = 4 if pipeline is CIRCULAR else 3
  layers = peftlab.stack(Dense, length, rngs=0)
  _, created = Scan().apply(peftlab.split(layers), X, add_factors)
  y, natural, before, after = run_staged(pipeline, layers, X, add_factors)
  peftlab.assert_base_shared(before, after)
  chex.assert_trees_all_equal(natural.adapter['a'], created.adapter['a',])
  assert len({a.tobytes() for a in np.asarray(natural.adapter['a'])}) == length
  plain, _ = Scan().run(layers, X, lambda layer, x: layer(x))
  chex.assert_trees_all_close(y, plain, rtol=1e-5)


def test_a_replaced_kernel_is_gone_and_its_codes_get_out():
  def body(layer, x):
    if hasattr(layer, 'kernel'):
      layer.scale = nnx.Param(jnp.max(jnp.abs(layer.kernel[...])) / 127)
      layer.codes = nnx.Param(jnp.round(layer.kernel[...] / layer.scale[...]).astype(jnp.int8))
      del layer.kernel
    return x + x @ (layer.codes[...].astype(jnp.float32) * layer.scale[...])

  layers = peftlab.stack(Dense, 4, rngs=0)
  _, created = Scan().apply(peftlab.split(layers), X, body)
  y, natural, before, after = run_staged(CIRCULAR, layers, X, body)
  assert sorted(after.base) == ['bias', 'codes', 'scale']
  assert after.base['bias'] is before.base['bias']
  for name in ('codes', 'scale'):
    chex.assert_trees_all_equal(natural.base[name], created.base[name,])
  again, _ = Scan().run(peftlab.merge(natural), X, body)
  chex.assert_trees_all_close(y, again, rtol=1e-5)


def test_a_kept_array_that_the_body_changes_is_an_error_that_names_it():
  def body(layer, x):
    layer.bias[...] = layer.bias[...] * 2
    return layer(x)

  with pytest.raises(
    ValueError, match='bias is a kept base array of a layer, and the body changed'
  ):
    run_staged(CIRCULAR, peftlab.stack(Dense, 4, rngs=0), X, body)


def test_run_updates_the_state_of_the_module_in_place():
  layers = CIRCULAR.lay_out(peftlab.stack(Cached, 4, rngs=0), pipelines.mesh(2))

  def body(layer, x):
    layer.cache[...] = layer.cache[...] + x[None, :, 0]
    return x + 1

  with jax.set_mesh(pipelines.mesh(2)):
    _, after = CIRCULAR.run(layers, X, body)
  assert after is layers
  assert after.layer_order == (0, 2, 1, 3)
  chex.assert_trees_all_close(layers.cache[...][1, 0], X[:, 0] + 2, rtol=1e-6)


def test_no_layers_give_the_input_back():
  layers = peftlab.stack(Dense, 0, rngs=0)
  y, after = Pipeline().run(layers, X, add_factors)
  assert y is X
  assert after is layers


def sow_int(layer, x):
  layer.seen = nnx.Intermediate(jnp.int32(1))
  return x


def make_cache(rngs):
  layer = Dense(rngs)
  layer.cache = nnx.Cache(jnp.zeros((ROWS, D)))
  return layer


def make_short_cache(rngs):
  layer = Dense(rngs)
  layer.cache = nnx.Cache(jnp.zeros((3, D)), axes=('batch', 'embed'))
  return layer


def call(layer, x, *context):
  del context
  return layer(x)


BAD = {
  'context': (Dense, call, (jnp.zeros((3, D)),), r'Argument 0 of the context has shape \(3, 4\)'),
  'sown': (Dense, sow_int, (), r'seen, which a layer made, is int32 \(\); of 4 microbatches only'),
  'cache': (make_cache, call, (), 'cache is a cache without logical axes'),
  'rows': (make_short_cache, call, (), r'cache has shape \(4, 3, 4\) with axes .*; x has 8 rows'),
}


@pytest.mark.parametrize('case', BAD)
def test_what_cannot_be_cut_or_put_together_is_refused(case):
  make, body, context, message = BAD[case]
  with pytest.raises(ValueError, match=message):
    run_staged(CIRCULAR, peftlab.stack(make, 4, rngs=0), X, body, *context)

"""Law 5: what a body keeps, creates, replaces and changes, at stack axis 0 and 1, scan and loop."""

import warnings

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

import peftlab
from peftlab import _parts, testing
from peftlab.appliers import Scan, Sequential, absorb

pytestmark = pytest.mark.usefixtures('quick_compiles')

D, LENGTH = 16, 3
X = jax.random.normal(jax.random.key(1), (4, D))
APPLIERS = (Scan(), Sequential(), Scan(remat='full'))


class Dense(nnx.Module):
  """x + x W + n, with a counter."""

  def __init__(self, rngs):
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), (D, D)) * 0.1, axes=('embed', 'mlp'))
    self.bias = nnx.Param(jnp.ones((D,)))
    self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

  def __call__(self, x):
    self.calls[...] += 1
    return x + x @ self.kernel[...] + self.bias[...].reshape(1, -1)


def layers(axis=0):
  return peftlab.stack(Dense, LENGTH, rngs=0, axis=axis)


def add_factors(layer, x):
  """What qwix's LoRA does: the factors are made in the forward pass, from the layer's own rng."""
  if not hasattr(layer, 'a'):
    key = jax.random.fold_in(jax.random.key(0), jnp.sum(layer.kernel[...] * 1e3).astype(jnp.int32))
    layer.a = nnx.LoRAParam(jax.random.normal(key, (D, 2)))
    layer.b = nnx.LoRAParam(jnp.zeros((2, D)))
  return layer(x) + x @ layer.a[...] @ layer.b[...]


def shapes(tree):
  return {_parts.path_name(p): jax.tree.map(jnp.shape, a) for p, a in _parts.flat(tree).items()}


def apply(stack, applier, body):
  parts = peftlab.split(stack)
  y, created = applier.apply(parts, X, body)
  return y, parts, absorb(parts, created)


@pytest.mark.parametrize('axis', (0, 1))
@pytest.mark.parametrize('applier', APPLIERS, ids=str)
def test_created_adapter_params_get_out_stacked_like_their_layer(applier, axis):
  y, before, after = apply(layers(axis), applier, add_factors)
  assert shapes(after.adapter) == (
    {'a': (3, D, 2), 'b': (3, 2, D)} if axis == 0 else {'a': (D, 3, 2), 'b': (2, 3, D)}
  )
  peftlab.assert_base_shared(before, after)
  assert after.base.keys() == before.base.keys()
  plain, _ = Sequential().run(layers(axis), X, lambda layer, x: layer(x))
  chex.assert_trees_all_close(y, plain, rtol=1e-6)
  per_layer = np.moveaxis(np.asarray(after.adapter['a']), axis, 0)
  assert len({layer.tobytes() for layer in per_layer}) == LENGTH, 'layers drew the same factor'


@pytest.mark.parametrize('axis', (0, 1))
@pytest.mark.parametrize('applier', APPLIERS, ids=str)
def test_the_stack_runs_on_with_what_it_created(applier, axis):
  y, _, after = apply(layers(axis), applier, add_factors)
  again, created = applier.apply(after, X, add_factors)
  chex.assert_trees_all_close(again, y, rtol=1e-6)
  assert created.graph == after.graph
  assert (created.adapter, created.base, created.gone) == ({}, {}, ())
  moved = jax.tree.map(lambda a: a + 0.1, after.adapter)
  other, _ = applier.apply(after.replace(adapter=moved), X, add_factors)
  assert float(jnp.max(jnp.abs(other - y))) > 0.1
  model = peftlab.merge(after)
  assert {v.get_metadata()['stack'] for v in (model.a, model.b, model.kernel)} == {(axis,)}


def test_three_stacks_with_created_factors_cost_one_base_and_one_trace():
  chex.clear_trace_counter()
  stack = layers()
  parts = peftlab.split(stack)
  run = jax.jit(chex.assert_max_traces(lambda p, x: Scan().apply(p, x, add_factors)[1], n=1))
  made = [absorb(parts, run(parts, X + i)) for i in range(3)]
  own = 3 * 2 * D * LENGTH * 2 * 4
  counters = 3 * LENGTH * 4
  grown = peftlab.nbytes([(m.adapter, m.base, m.state) for m in made]) - peftlab.nbytes(parts.base)
  assert grown == own + counters
  for one in made:
    peftlab.assert_base_shared(parts, one)


def quantize(qtype, tile):
  """A body whose layer replaces its kernel by codes and scales, one Variable each."""

  def body(layer, x):
    if hasattr(layer, 'kernel'):
      array = qwix.quantize(layer.kernel[...], qtype, channelwise_axes=(1,), tiled_axes=tile)
      layer.codes, layer.scale = nnx.Param(array.qvalue), nnx.Param(array.scale)
      del layer.kernel
    layer.calls[...] += 1
    array = qwix.QArray(qvalue=layer.codes[...], scale=layer.scale[...], qtype=qtype)
    return x + x @ qwix.dequantize(array) + layer.bias[...].reshape(1, -1)

  return body


QTYPES = {'int8': (jnp.int8, None, 0.01), 'nf4': ('nf4', {0: 8}, 0.13)}


@pytest.mark.parametrize('qtype', QTYPES)
@pytest.mark.parametrize('axis', (0, 1))
@pytest.mark.parametrize('applier', (Scan(), Sequential()), ids=str)
def test_a_replaced_kernel_is_gone_and_its_codes_get_out(applier, axis, qtype):
  dtype, tile, error = QTYPES[qtype]
  y, before, after = apply(layers(axis), applier, quantize(dtype, tile))
  assert sorted(after.base) == ['bias', 'codes', 'scale']
  assert after.base['bias'] is before.base['bias']
  for name, one in (('codes', (D, D)), ('scale', (2 if tile else 1, D))):
    assert after.base[name].shape == (*one[:axis], LENGTH, *one[axis:])
  kernels = np.moveaxis(np.asarray(before.base['kernel']), axis, 0)
  for i in range(LENGTH):

    def take(name, i=i):
      return jnp.take(after.base[name], i, axis=axis)

    array = qwix.QArray(qvalue=take('codes'), scale=take('scale'), qtype=dtype)
    off = np.asarray(qwix.dequantize(array)).reshape(D, D) - kernels[i]
    assert np.linalg.norm(off) < error * np.linalg.norm(kernels[i])
  again, created = applier.apply(after, X, quantize(dtype, tile))
  chex.assert_trees_all_close(again, y, rtol=1e-6)
  assert (created.base, created.gone) == ({}, ())
  np.testing.assert_array_equal(after.state['calls'], [1] * LENGTH)


@pytest.mark.parametrize('qtype', QTYPES)
@pytest.mark.parametrize('axis', (0, 1))
@pytest.mark.parametrize('applier', (Scan(), Sequential()), ids=str)
def test_a_layer_that_qwix_quantizes_while_traced(applier, axis, qtype):
  """qwix's PtqProvider puts a composite of two Variables in the place of each kernel."""
  dtype, tile, error = QTYPES[qtype]
  rule = qwix.QuantizationRule(weight_qtype=dtype, tile_size=tile and tile[0])
  provider = qwix.PtqProvider([rule])

  def body(layer, x):
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', DeprecationWarning)  # qwix calls nnx's old names
      quantized = qwix.quantize_model(layer, provider, x)
      y = quantized(x)
    layer.up.kernel, layer.down.kernel = quantized.up.kernel, quantized.down.kernel
    return y

  stack = testing.StackModel(length=LENGTH, axis=axis).layers
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    y, before, after = apply(stack, applier, body)
  for name, (ins, outs) in {'up': (16, 24), 'down': (24, 16)}.items():
    assert after.base[name]['bias'] is before.base[name]['bias']
    array = after.base[name]['kernel']['array']
    for key, one in (('qvalue', (ins, outs)), ('scale', (ins // 8 if tile else 1, outs))):
      assert array[key].shape == (*one[:axis], LENGTH, *one[axis:])
  plain, _, _ = apply(stack, applier, lambda layer, x: layer(x))
  assert float(jnp.linalg.norm(y - plain)) < 3 * error * float(jnp.linalg.norm(plain - X))


@pytest.mark.parametrize('applier', APPLIERS, ids=str)
def test_a_composite_leaf_in_one_variable_is_stacked_array_by_array(applier):
  def body(layer, x):
    array = qwix.quantize(layer.kernel[...], jnp.int8, channelwise_axes=(1,))
    layer.kernel = nnx.Param(array)
    return x + qwix.dot_general(x, array, (((1,), (0,)), ((), ())))

  _, before, after = apply(layers(), applier, body)
  array = after.base['kernel']
  assert (array.qvalue.shape, array.scale.shape) == ((LENGTH, D, D), (LENGTH, 1, D))
  assert after.base['bias'] is before.base['bias']
  kernel = peftlab.merge(after).kernel
  assert (kernel.get_metadata().get('stack'), kernel.get_metadata().get('axes')) == ((0,), None)


@pytest.mark.parametrize('applier', APPLIERS, ids=str)
def test_a_kept_array_that_the_body_changes_is_an_error_that_names_it(applier):
  def body(layer, x):
    layer.bias[...] = layer.bias[...] * 2
    return layer(x)

  message = 'bias is a kept base array of a layer, and the body changed it in place'
  with pytest.raises(ValueError, match=message):
    applier.apply(peftlab.split(layers()), X, body)


@pytest.mark.parametrize('applier', APPLIERS, ids=str)
def test_a_changed_adapter_array_is_an_error_too(applier):
  _, _, after = apply(layers(), applier, add_factors)

  def body(layer, x):
    layer.a[...] = layer.a[...] * 2
    return layer(x)

  with pytest.raises(ValueError, match='a is a kept adapter array'):
    applier.apply(after, X, body)


def test_an_array_may_be_set_to_itself():
  def body(layer, x):
    layer.bias.set_value(layer.bias.get_value())
    return layer(x)

  y, before, after = apply(layers(), Scan(), body)
  assert y.shape == X.shape
  peftlab.assert_base_shared(before, after)

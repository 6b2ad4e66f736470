"""Adapter types against PEFT 0.21.2: counts, first values, outputs, gradients, merged weights."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import fuse
from tests.plugins.zoo_cases import CASES, golden, short

pytestmark = [
  pytest.mark.usefixtures('quick_compiles', 'usual_ranks'),
  pytest.mark.filterwarnings('ignore:AdaptedEmbed is merged as an embedding'),
]

TOLERANCE = 1e-5


def layer_of(on, base):
  """The plain layer of a golden, and its input as ours is laid out."""
  rngs, w = nnx.Rngs(0), base['base/layer.weight']
  x = jnp.asarray(base['base/input'])
  if on == 'embedding':
    layer, weight = nnx.Embed(*w.shape, rngs=rngs), w
    layer.embedding[...] = jnp.asarray(weight)
    return layer, x
  if on == 'norm':
    layer = nnx.LayerNorm(w.shape[0], epsilon=1e-5, rngs=rngs)
    layer.scale[...] = jnp.asarray(w)
  elif w.ndim == 4:
    strides, pad = (1, 0) if on == 'conv_1x1' else (2, 1)
    layer = nnx.Conv(w.shape[1], w.shape[0], w.shape[2:], strides=strides, padding=pad, rngs=rngs)
    layer.kernel[...] = jnp.asarray(w.transpose(2, 3, 1, 0))
    x = x.transpose(0, 2, 3, 1)
  else:
    layer = nnx.Linear(w.shape[1], w.shape[0], rngs=rngs)
    layer.kernel[...] = jnp.asarray(w.T)
  layer.bias[...] = jnp.asarray(base['base/layer.bias'])
  return layer, x


def ours(on, array):
  """An output or a weight's change, laid out as ours."""
  if array.ndim == 4 and on.startswith('conv'):
    return array.transpose(0, 2, 3, 1)
  return array


@functools.cache
def loaded(name):
  """(golden, fresh model, the model with PEFT's arrays, its input, report)."""
  case, base = CASES[name], golden(name)
  layer, x = layer_of(case.on, base)
  fresh, report = peftlab.attach(layer, case.adapter, where='.*')
  model = peftlab.merge(peftlab.split(fresh))
  values = case.slots(short(base, 'adapter')) | case.fixed(base)
  start = case.start_from(short(base, 'start')) if case.start_from else {}
  for slot, array in (values | start).items():
    held = getattr(model.adapters[0], slot)
    assert held.shape == array.shape, f'{slot}: {held.shape}, {array.shape}'
    held[...] = jnp.asarray(array, held.dtype)
  return base, fresh, model, x, report


def close(actual, expected, what):
  actual, expected = np.asarray(actual), np.asarray(expected)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * scale, err_msg=what)


@pytest.mark.parametrize('name', CASES)
def test_it_trains_as_many_numbers(name):
  report = loaded(name)[-1]
  assert report.trainable == CASES[name].count


@pytest.mark.parametrize('name', [n for n in CASES if CASES[n].forward])
def test_output_and_gradients_are_those_of_peft(name):
  base, _, model, x, _ = loaded(name)
  case = CASES[name]
  cotangent = jnp.asarray(ours(case.on, base['base/cotangent']))

  @jax.jit
  def run(parts):
    def total(adapter):
      y = peftlab.merge(parts.replace(adapter=adapter))(x)
      return (y * cotangent).sum(), y

    inexact = {
      p: a for p, a in peftlab._parts.flat(parts.adapter).items() if a.dtype == jnp.float32
    }
    rest = {p: a for p, a in peftlab._parts.flat(parts.adapter).items() if p not in inexact}
    gradients, y = jax.grad(lambda some: total(peftlab._parts.nest(some | rest)), has_aux=True)(
      inexact
    )
    return y, {p[-1]: g for p, g in gradients.items()}

  y, gradients = run(peftlab.split(model))
  close(y, ours(case.on, base['output']), 'output')
  expected = case.slots(short(base, 'grad'))
  for slot, gradient in expected.items():
    if slot not in case.wrong:
      close(gradients[slot], gradient, f'gradient of {slot}')


@pytest.mark.parametrize('name', [n for n in CASES if CASES[n].on != 'norm'])
def test_merged_weights_are_those_of_peft(name):
  base, _, model, _, _ = loaded(name)
  case = CASES[name]
  merged = fuse.fuse(model)
  weight = base['base/layer.weight'] + base['delta/layer.weight']
  got = merged.embedding if case.on == 'embedding' else merged.kernel
  got = np.asarray(got[...])
  if case.on.startswith('conv'):
    got = got.transpose(3, 2, 0, 1)
  elif case.on != 'embedding':
    got = got.T
  close(got, weight, 'merged weight')
  if 'delta/layer.bias' in base:
    close(merged.bias[...], base['base/layer.bias'] + base['delta/layer.bias'], 'merged bias')


@pytest.mark.parametrize('name', [n for n in CASES if CASES[n].start])
def test_it_starts_as_in_peft(name):
  base, fresh, _, _, _ = loaded(name)
  case = CASES[name]
  expected = case.slots(short(base, 'start'))
  for slot in case.start:
    close(getattr(fresh.adapters[0], slot)[...], expected[slot], slot)

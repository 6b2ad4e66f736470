"""LoRA: the equation in numpy, its scale, its counts, its inits; the rest is the suite's."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab.plugins.lora import INITS, LoRA

pytestmark = pytest.mark.usefixtures('quick_compiles')

X = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)


def attached(**fields):
  model = nnx.Linear(12, 20, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0))
  return peftlab.attach(model, LoRA(**fields))


def with_b(model):
  p = model.adapters[0]
  p.b[...] = jax.random.normal(jax.random.key(9), p.b.shape)
  return {k: np.asarray(getattr(p, k)[...], np.float64) for k in ('a', 'b', 'scale')}


SCALES = {
  (8, 16.0, False): 2.0,
  (4, 1.0, False): 0.25,
  (4, 16.0, True): 8.0,
  (2, 3.0, True): 3.0 / math.sqrt(2),
}


@pytest.mark.parametrize('case', SCALES, ids=str)
def test_y_is_x_w_plus_the_scaled_product_plus_the_bias(case):
  rank, alpha, rslora = case
  model, _ = attached(rank=rank, alpha=alpha, rslora=rslora)
  p = with_b(model)
  assert p['scale'] == pytest.approx(SCALES[case])
  w, bias = (np.asarray(v[...], np.float64) for v in (model.kernel, model.bias))
  expected = X @ (w + SCALES[case] * p['a'] @ p['b']) + bias
  np.testing.assert_allclose(model(jnp.asarray(X)), expected, rtol=1e-5, atol=1e-5)


def test_it_trains_rank_times_in_plus_out():
  _, report = attached(rank=3)
  assert report.trainable == 3 * (12 + 20)
  assert report.rows[0].slots == {'a': (12, 3), 'b': (3, 20), 'scale': ()}


def test_b_starts_at_0_and_the_scale_is_frozen():
  model, _ = attached(rank=3)
  parts = peftlab.split(model)
  assert not np.any(model.adapters[0].b[...])
  flags = {'a': True, 'b': True, 'scale': False}
  assert peftlab.trainable(parts) == {'adapters': {0: flags}}


# Standard deviation of A [400, 50] by definition: fan-in 400.
DEVIATIONS = {
  'he_uniform': math.sqrt(2 / 400),
  'gaussian': 0.02,
  'lecun_normal': math.sqrt(1 / 400),
}


@pytest.mark.parametrize('init', INITS)
def test_a_starts_as_its_init_says(init):
  model = nnx.Linear(400, 60, use_bias=False, rngs=nnx.Rngs(0))
  model, _ = peftlab.attach(model, LoRA(rank=50, init=init))
  a = np.asarray(model.adapters[0].a[...])
  assert a.std() == pytest.approx(DEVIATIONS[init], rel=0.03)
  assert abs(a.mean()) < 0.05 * DEVIATIONS[init]


def test_dropout_drops_and_rescales_the_input_of_a():
  """One token, A = B = identity-like: what comes out is 0 or x / (1 - rate)."""
  model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
  model, _ = peftlab.attach(model, LoRA(rank=64, alpha=64.0, dropout=0.25))
  p = model.adapters[0]
  p.a[...], p.b[...] = jnp.eye(64), jnp.eye(64)
  x = jnp.ones((200, 64))
  model.eval()
  off = model(x) - x @ model.kernel[...]
  np.testing.assert_allclose(off, 1, rtol=1e-4)
  model.train()
  off = np.asarray(model(x) - x @ model.kernel[...])
  kept = off > 0.5
  np.testing.assert_allclose(off[kept], 1 / 0.75, rtol=1e-4)
  np.testing.assert_allclose(off[~kept], 0, atol=1e-4)
  assert kept.mean() == pytest.approx(0.75, abs=0.01)
  assert model.adapters[0].rng_count[...] == 1

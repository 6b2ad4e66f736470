"""Optimizers and schedules by name: hand-worked numbers, and every one of them descends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from peftlab.train.optimizers import optimizers, schedules

SCHEDULES = {
  ('constant', 0): [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
  ('linear', 0): [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
  ('linear', 2): [1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8],
  ('cosine', 0): [(1 + np.cos(np.pi * i / 10)) / 2 for i in range(10)],
  ('wsd', 0): [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5],
  ('wsd', 1): [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5],
}


@pytest.mark.parametrize(('name', 'warmup'), SCHEDULES)
def test_schedules(name, warmup):
  schedule = schedules.get(name)(10, warmup)
  with jax.numpy_dtype_promotion('standard'):
    found = [float(schedule(jnp.asarray(i, jnp.int32))) for i in range(10)]
  np.testing.assert_allclose(found, SCHEDULES[name, warmup], rtol=1e-6)


@pytest.mark.parametrize('name', optimizers.names())
def test_every_optimizer_descends(name):
  start = {'w': jnp.linspace(-1, 2, 40 * 33).reshape(40, 33)}

  def loss(tree):
    return jnp.sum(jnp.square(tree['w'] - 0.5))

  make = optimizers.get(name)

  @jax.jit
  def step(tree, state, rate):
    optimizer = make(rate, weight_decay=0.0, b1=0.9, b2=0.99, eps=1e-8)
    with jax.numpy_dtype_promotion('standard'):
      updates, state = optimizer.update(jax.grad(loss)(tree), state, tree)
    return optax.apply_updates(tree, updates), state

  state = make(0.01, weight_decay=0.0, b1=0.9, b2=0.99, eps=1e-8).init(start)
  tree = start
  for _ in range(20):
    tree, state = step(tree, state, 0.01)
  assert float(loss(tree)) < 0.9 * float(loss(start))


def test_weight_decay_is_decoupled():
  optimizer = optimizers.get('adamw')(0.1, weight_decay=0.5, b1=0.9, b2=0.99, eps=1e-8)
  tree = {'w': jnp.ones((3,))}
  with jax.numpy_dtype_promotion('standard'):
    updates, _ = optimizer.update({'w': jnp.zeros((3,))}, optimizer.init(tree), tree)
  np.testing.assert_allclose(updates['w'], -0.1 * 0.5, rtol=1e-6)

"""The delta rule in chunks is the recurrence, token by token; segments and states included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab.models.delta_rule import delta_rule


def arrays(length, seed=0):
  rng = np.random.default_rng(seed)
  q, k = (rng.normal(size=(2, length, 3, 4)) for _ in range(2))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v = rng.normal(size=(2, length, 3, 5))
  decay, beta = -rng.exponential(size=(2, length, 3)), rng.random((2, length, 3))
  return [jnp.asarray(a, jnp.float32) for a in (q, k, v, decay, beta)]


def by_hand(q, k, v, decay, beta, state, segments=None):
  """The recurrence in float64."""
  q, k, v, decay, beta, state = (np.asarray(a, np.float64) for a in (q, k, v, decay, beta, state))
  y = np.zeros(v.shape)
  for t in range(v.shape[1]):
    if segments is not None and t:
      state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
    state = state * np.exp(decay[:, t])[..., None, None]
    read = np.einsum('bhkv,bhk->bhv', state, k[:, t])
    write = beta[:, t][..., None] * (v[:, t] - read)
    state = state + k[:, t][..., None] * write[..., None, :]
    y[:, t] = np.einsum('bhkv,bhk->bhv', state, q[:, t])
  return y, state


@pytest.mark.parametrize(('length', 'chunk'), ((1, 64), (7, 64), (12, 4), (13, 4)))
def test_chunks_equal_the_recurrence(length, chunk):
  given = arrays(length)
  start = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4, 5)), jnp.float32)
  for state in (None, start):
    found = delta_rule(*given, state=state, chunk=chunk)
    expected = by_hand(*given, np.zeros(start.shape) if state is None else state)
    for a, b in zip(found, expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_every_segment_begins_with_an_empty_state():
  given = arrays(13)
  segments = np.array([[1] * 3 + [2] * 7 + [0] * 3, [1] * 4 + [2] * 1 + [3] * 8], np.int32)
  y, state = delta_rule(*given, segment_ids=jnp.asarray(segments), chunk=4)
  expected, last = by_hand(*given, np.zeros((2, 3, 4, 5)), segments)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(state, last, rtol=1e-4, atol=1e-5)


def test_gradients_are_finite_where_decay_is_strong():
  q, k, v, decay, beta = arrays(9)
  loss = lambda *a: jnp.sum(delta_rule(*a, chunk=4)[0] ** 2)  # noqa: E731
  grads = jax.grad(loss, argnums=(0, 1, 2, 3, 4))(q, k, v, 200 * decay, beta)
  assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads)

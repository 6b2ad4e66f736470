"""Attention against loops over single queries, its mask by hand, its gradient by autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab.models import attention


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attend_by_loops(q, k, v, mask, scale, softcap):
  """One query of one head at a time."""
  y = np.zeros_like(q)
  groups = q.shape[2] // k.shape[2]
  for b, i, h in np.ndindex(*q.shape[:3]):
    seen = mask[b, i]
    scores = k[b, seen, h // groups] @ q[b, i, h] * scale
    if softcap is not None:
      scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    y[b, i, h] = weights / weights.sum() @ v[b, seen, h // groups]
  return y


@pytest.mark.parametrize('heads', ((4, 4), (4, 2), (9, 3), (3, 1)))
@pytest.mark.parametrize('softcap', (None, 0.7))
def test_attend_equals_loops(heads, softcap):
  q, k, v = random(2, 6, heads[0], 4), random(2, 6, heads[1], 4, seed=1), random(2, 6, heads[1], 4)
  mask = np.tril(np.ones((6, 6), bool))[None].repeat(2, 0)
  mask[1, 3:, :3] = False
  expected = attend_by_loops(q, k, v, mask, 0.5, softcap)
  found = attention.attend(*map(jnp.asarray, (q, k, v, mask)), scale=0.5, softcap=softcap)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_attend_keeps_bfloat16_and_its_scores_are_float32():
  q = jnp.full((1, 2, 1, 4), 8.0, jnp.bfloat16)
  # Scores 256 and 256.5: apart in float32, equal in bfloat16.
  k = jnp.full((1, 2, 1, 4), 8.0, jnp.bfloat16).at[0, 1, 0, 0].set(8.0625)
  v = jnp.asarray([0.0, 1.0], jnp.bfloat16)[None, :, None, None] * jnp.ones_like(k)
  y = attention.attend(q, k, v, jnp.ones((1, 2, 2), bool), scale=1.0)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(y, np.float32), 1 / (1 + np.exp(-0.5)), rtol=0.01)


def test_gradient_of_the_masked_softmax_is_that_of_its_formula():
  scores, change = jnp.asarray(random(2, 3, 5)), jnp.asarray(random(2, 3, 5, seed=1))
  mask = jnp.asarray(random(1, 3, 5, seed=2) > 0).at[..., 0].set(True)

  def plain(s):
    e = jnp.where(mask, jnp.exp(s), 0.0)
    return e / e.sum(-1, keepdims=True)

  found, rule = jax.vjp(lambda s: attention.masked_softmax(s, mask, jnp.float32), scores)
  expected, formula = jax.vjp(plain, scores)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  np.testing.assert_allclose(rule(change)[0], formula(change)[0], atol=1e-6)


def test_a_query_that_sees_nothing_is_finite():
  scores = jnp.zeros((1, 2))
  weights = attention.masked_softmax(scores, jnp.zeros((1, 2), bool), jnp.float32)
  assert jnp.isfinite(weights).all()


def mask_of(**options):
  positions = jnp.arange(4)[None, :]
  mask = attention.causal_mask(positions, positions, **options)
  return np.asarray(mask[0]).astype(int).tolist()


def test_a_token_sees_itself_and_what_came_before():
  assert mask_of() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_window_counts_the_token_itself():
  expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
  assert mask_of(window=jnp.asarray(2)) == expected
  assert mask_of(window=jnp.asarray(0)) == mask_of()


def test_a_token_sees_its_own_segment_only():
  segments = jnp.asarray([[1, 1, 2, 2]])
  assert mask_of(segment_ids=segments) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def sunk_by_hand(q, k, v, mask, sinks):
  """Softmax over the keys and one more logit that has no value, in plain operations."""
  groups = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(a, groups, axis=2) for a in (k, v))
  scores = jnp.where(mask[:, None], jnp.einsum('bqhd,bkhd->bhqk', q, k), -jnp.inf)
  last = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
  weights = jax.nn.softmax(jnp.concatenate([scores, last], axis=-1), axis=-1)[..., :-1]
  return jnp.einsum('bhqk,bkhd->bqhd', weights, v)


def test_sinks_take_part_in_the_softmax_and_have_no_value():
  q, k, v = random(2, 5, 4, 6), random(2, 5, 2, 6, seed=1), random(2, 5, 2, 3, seed=2)
  sinks, mask = random(4, seed=3), jnp.asarray(np.tril(np.ones((1, 5, 5), bool)))
  given = [jnp.asarray(a) for a in (q, k, v)]

  def loss(function, *args):
    return jnp.sum(jnp.sin(function(*args)))

  ours = lambda q, k, v, s: attention.attend(q, k, v, mask, scale=1.0, sinks=s)  # noqa: E731
  theirs = lambda q, k, v, s: sunk_by_hand(q, k, v, mask, s)  # noqa: E731
  np.testing.assert_allclose(ours(*given, sinks), theirs(*given, sinks), rtol=1e-5, atol=1e-6)
  grads = [
    jax.grad(lambda *a, f=f: loss(f, *a), argnums=(0, 1, 2, 3))(*given, jnp.asarray(sinks))
    for f in (ours, theirs)
  ]
  for found, expected in zip(*grads, strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_negative_position_is_not_written_into_a_cache():
  cache = attention.empty_cache((), (2, 3, 4), dtype=jnp.float32, axes=('batch', 'length', 'x'))
  new = jnp.ones((2, 2, 4))
  attention.extend(cache, new, jnp.asarray([[0, -1], [2, 1]]), axes=('batch', 'length', 'x'))
  np.testing.assert_array_equal(cache[...][..., 0], [[1, 0, 0], [0, 1, 1]])

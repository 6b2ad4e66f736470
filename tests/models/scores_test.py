"""Scores against loops over single queries, their mask by hand, their gradient by autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab.models import scores


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attend_by_loops(q, k, v, mask, scale, softcap):
  """One query of one head at a time."""
  y = np.zeros_like(q)
  groups = q.shape[2] // k.shape[2]
  for b, i, h in np.ndindex(*q.shape[:3]):
    seen = mask[b, i]
    logits = k[b, seen, h // groups] @ q[b, i, h] * scale
    if softcap is not None:
      logits = softcap * np.tanh(logits / softcap)
    weights = np.exp(logits - logits.max())
    y[b, i, h] = weights / weights.sum() @ v[b, seen, h // groups]
  return y


@pytest.mark.parametrize('heads', ((4, 4), (4, 2), (9, 3), (3, 1)))
@pytest.mark.parametrize('softcap', (None, 0.7))
def test_attend_equals_loops(heads, softcap):
  q, k, v = random(2, 6, heads[0], 4), random(2, 6, heads[1], 4, seed=1), random(2, 6, heads[1], 4)
  mask = np.tril(np.ones((6, 6), bool))[None].repeat(2, 0)
  mask[1, 3:, :3] = False
  positions, ids = jnp.arange(6)[None, :], jnp.asarray([[1] * 6, [1, 1, 1, 2, 2, 2]])
  expected = attend_by_loops(q, k, v, mask, 0.5, softcap)
  seen = scores.causal_mask(positions, positions, ids)
  found = scores.attend(*map(jnp.asarray, (q, k, v)), seen, scale=0.5, softcap=softcap)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_attend_keeps_bfloat16_and_its_scores_are_float32():
  q = jnp.full((1, 2, 1, 4), 8.0, jnp.bfloat16)
  # Scores 256 and 256.5: apart in float32, equal in bfloat16.
  k = jnp.full((1, 2, 1, 4), 8.0, jnp.bfloat16).at[0, 1, 0, 0].set(8.0625)
  v = jnp.asarray([0.0, 1.0], jnp.bfloat16)[None, :, None, None] * jnp.ones_like(k)
  mask = scores.causal_mask(jnp.asarray([[1, 1]]), jnp.asarray([[0, 1]]))  # both see both
  y = scores.attend(q, k, v, mask, scale=1.0)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(y, np.float32), 1 / (1 + np.exp(-0.5)), rtol=0.01)


def test_gradient_of_the_masked_softmax_is_that_of_its_formula():
  logits, change = jnp.asarray(random(2, 3, 5)), jnp.asarray(random(2, 3, 5, seed=1))
  mask = jnp.asarray(random(1, 3, 5, seed=2) > 0).at[..., 0].set(True)

  def plain(s):
    e = jnp.where(mask, jnp.exp(s), 0.0)
    return e / e.sum(-1, keepdims=True)

  found, rule = jax.vjp(lambda s: scores.masked_softmax(s, mask, jnp.float32), logits)
  expected, formula = jax.vjp(plain, logits)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  np.testing.assert_allclose(rule(change)[0], formula(change)[0], atol=1e-6)


def test_a_query_that_sees_nothing_is_finite():
  logits = jnp.zeros((1, 2))
  weights = scores.masked_softmax(logits, jnp.zeros((1, 2), bool), jnp.float32)
  assert jnp.isfinite(weights).all()


def mask_of(**options):
  positions = jnp.arange(4)[None, :]
  mask = scores.causal_mask(positions, positions, **options).array()
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
  logits = jnp.where(mask[:, None], jnp.einsum('bqhd,bkhd->bhqk', q, k), -jnp.inf)
  last = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
  weights = jax.nn.softmax(jnp.concatenate([logits, last], axis=-1), axis=-1)[..., :-1]
  return jnp.einsum('bhqk,bkhd->bqhd', weights, v)


def test_sinks_take_part_in_the_softmax_and_have_no_value():
  q, k, v = random(2, 5, 4, 6), random(2, 5, 2, 6, seed=1), random(2, 5, 2, 3, seed=2)
  positions = jnp.arange(5)[None, :]
  sinks, seen = random(4, seed=3), scores.causal_mask(positions, positions)
  mask = jnp.asarray(np.tril(np.ones((1, 5, 5), bool)))
  given = [jnp.asarray(a) for a in (q, k, v)]

  def loss(function, *args):
    return jnp.sum(jnp.sin(function(*args)))

  ours = lambda q, k, v, s: scores.attend(q, k, v, seen, scale=1.0, sinks=s)  # noqa: E731
  theirs = lambda q, k, v, s: sunk_by_hand(q, k, v, mask, s)  # noqa: E731
  np.testing.assert_allclose(ours(*given, sinks), theirs(*given, sinks), rtol=1e-5, atol=1e-6)
  grads = [
    jax.grad(lambda *a, f=f: loss(f, *a), argnums=(0, 1, 2, 3))(*given, jnp.asarray(sinks))
    for f in (ours, theirs)
  ]
  for found, expected in zip(*grads, strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


IDS = np.asarray([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0]])
MASKS = {
  'causal': {},
  'a window': {'window': jnp.asarray(3)},
  'segments': {'segment_ids': jnp.asarray(IDS)},
  'virtual rows in front': {'segment_ids': jnp.asarray(IDS[:, 2:])},
  'all': {'segment_ids': jnp.asarray(IDS), 'window': jnp.asarray(4)},
}


@pytest.mark.parametrize('name', MASKS)
@pytest.mark.parametrize(
  'most', (2 * 4 * 11 * 5, 1)
)  # 5 queries at a time, the last part padded; 1
def test_blocks_of_queries_give_what_all_at_once_give(name, most):
  q, k, v = random(2, 11, 4, 6), random(2, 11, 2, 6, seed=1), random(2, 11, 2, 3, seed=2)
  positions = jnp.arange(11)[None, :]
  mask = scores.causal_mask(positions, positions, **MASKS[name])
  options = dict(scale=0.5, softcap=2.0, sinks=jnp.asarray(random(4, seed=3)))

  def total(q, k, v, most_scores):
    y = scores.attend(q, k, v, mask, **options, most_scores=most_scores)
    return jnp.sum(jnp.sin(y)), y

  run = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
  (_, expected), wanted = run(q, k, v, scores.MOST_SCORES)
  (_, found), grads = run(q, k, v, most)
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
  for one, other in zip(grads, wanted, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _inner(equation):
  for value in jax.tree.leaves(
    list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
  ):
    if hasattr(value, 'jaxpr') or hasattr(value, 'eqns'):
      yield getattr(value, 'jaxpr', value)


def scores_in(jaxpr, shape):
  """How many arrays of a shape a program makes, inner programs included."""
  found = 0
  for equation in jaxpr.eqns:
    found += sum(getattr(v.aval, 'shape', None) == shape for v in equation.outvars)
    for inner in _inner(equation):
      found += scores_in(inner, shape)
  return found


def test_no_more_scores_exist_at_once_than_the_limit():
  q, k = jnp.ones((1, 64, 4, 8)), jnp.ones((1, 64, 4, 8))
  positions = jnp.arange(64)[None, :]
  mask = scores.causal_mask(positions, positions)

  def loss(q, most):
    return scores.attend(q, k, k, mask, scale=1.0, most_scores=most).sum()

  whole = jax.make_jaxpr(jax.grad(lambda q: loss(q, 2**20)))(q)
  parts = jax.make_jaxpr(jax.grad(lambda q: loss(q, 16 * 4 * 64)))(q)
  assert scores_in(whole.jaxpr, (1, 4, 64, 64)) > 0
  assert scores_in(parts.jaxpr, (1, 4, 64, 64)) == 0
  assert scores_in(parts.jaxpr, (1, 4, 16, 64)) > 0


def test_gradients_of_bfloat16_keys_are_summed_in_float32():
  q, k, v = (jnp.asarray(random(1, 64, 2, 8, seed=s), jnp.bfloat16) for s in range(3))
  positions = jnp.arange(64)[None, :]
  mask = scores.causal_mask(positions, positions)

  def gradient(most):
    run = lambda v: scores.attend(q, k, v, mask, scale=1.0, most_scores=most).sum()  # noqa: E731
    return jax.grad(run)(v)

  found, expected = gradient(2 * 64), gradient(2**20)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2**-7, atol=2**-7
  )

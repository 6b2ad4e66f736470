"""Which keys a query sees, and what it takes of their values, some queries at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from einops import rearrange
import jax
import jax.numpy as jnp

from peftlab import _chunks, _kernel

# Float32 scores that may exist at once on a device: 64 MiB, half of the fast memory of a TPU core.
MOST_SCORES = 2**24
HEADS = ('batch', 'length', 'q_heads', 'head_dim')
VIRTUAL = jnp.iinfo(jnp.int32).min  # the segment of what every segment sees

# Positions [batch or 1, n] and segments [batch, n] or None.
Places = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Mask:
  """Which queries see which keys: those not behind them, of their segment, within a window.

  Attributes:
    queries: where they stand.
    keys: likewise.
    window: [] how many tokens back a query sees, its own included; 0 or None: all.
    virtual: whether some are of the segment VIRTUAL.
  """

  queries: Places
  keys: Places
  window: jax.Array | None = None
  virtual: bool = False

  def array(self) -> jax.Array:
    """True where a query sees a key: bool [batch or 1, queries, keys]."""
    (q_positions, q_ids), (k_positions, k_ids) = self.queries, self.keys
    back = q_positions[:, :, None] - k_positions[:, None, :]
    mask = back >= 0
    if self.window is not None:
      mask &= (self.window == 0) | (back < self.window)
    if q_ids is None or k_ids is None:
      return mask
    same = q_ids[:, :, None] == k_ids[:, None, :]
    if self.virtual:
      same |= (q_ids == VIRTUAL)[:, :, None] | (k_ids == VIRTUAL)[:, None, :]
    return mask & same


def causal_mask(
  q_positions: jax.Array,
  k_positions: jax.Array,
  segment_ids: jax.Array | None = None,
  window: jax.Array | None = None,
) -> Mask:
  """The mask of causal attention.

  Args:
    q_positions: [batch or 1, queries].
    k_positions: [batch or 1, keys].
    segment_ids: [batch, length] of queries and keys alike; a token sees its own segment only.
      Where there are more queries or keys, those in front are virtual and seen by every segment.
    window: see `Mask`.
  """
  if segment_ids is None:
    return Mask((q_positions, None), (k_positions, None), window)
  more = [p.shape[1] - segment_ids.shape[1] for p in (q_positions, k_positions)]
  ids = segment_ids.astype(jnp.int32)
  q, k = (jnp.pad(ids, ((0, 0), (n, 0)), constant_values=VIRTUAL) if n else ids for n in more)
  return Mask((q_positions, q), (k_positions, k), window, virtual=any(more))


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: Mask,
  *,
  scale: float,
  softcap: float | None = None,
  sinks: jax.Array | None = None,
  most_scores: int = MOST_SCORES,
) -> jax.Array:
  """softmax(mask(cap(scale q k^T))) v, each kv head serving a group of query heads.

  Scores and softmax are float32. The weights, in the dtype of v, are the one tensor of
  [batch, heads, queries, keys] that is kept for the backward pass; where there would be too many,
  blocks of queries follow each other and their weights are made again in the backward pass.

  Args:
    q: [batch, queries, q_heads, head_dim].
    k: [batch, keys, kv_heads, head_dim].
    v: [batch, keys, kv_heads, value_dim].
    mask: of these queries and keys.
    scale: factor of the scores.
    softcap: scores become cap * tanh(scores / cap).
    sinks: [q_heads] logits that take part in the softmax and have no value.
    most_scores: that may exist at once on a device of the mesh in context.

  Returns:
    [batch, queries, q_heads, value_dim] in the dtype of q.
  """
  options: Any = dict(scale=scale, softcap=softcap, sinks=sinks)
  per_query = k.shape[1] * q.shape[0] * q.shape[2] // _chunks.pieces(q.shape, HEADS)
  parts = _chunks.count(q.shape[1], per_query, most_scores)
  if parts == 1:
    return _kernel.keep(_attend(q, k, v, mask.array(), **options))

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def block(k: jax.Array, v: jax.Array, xs: tuple[jax.Array, Places]) -> jax.Array:
    here = dataclasses.replace(mask, queries=xs[1])
    return _attend(xs[0], k.astype(q.dtype), v.astype(q.dtype), here.array(), **options)

  # The gradients of k and v are sums over the blocks, in float32.
  whole = tuple(array.astype(jnp.float32) for array in (k, v))
  xs = jax.tree.map(lambda a: _chunks.cut(a, parts), (q, mask.queries))
  _, y = jax.lax.scan(lambda none, x: (none, block(*whole, x)), None, xs)
  return _kernel.keep(_chunks.joined(y, q.shape[1]))


def _attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  *,
  scale: float,
  softcap: float | None,
  sinks: jax.Array | None,
) -> jax.Array:
  # Plain batched products of [group x queries, head_dim] and [keys, head_dim]: with the group as a
  # dimension of its own, XLA's CPU backend transposes more and attention takes a quarter longer.
  kv_heads, groups = k.shape[2], q.shape[2] // k.shape[2]
  q = rearrange(q * jnp.asarray(scale, q.dtype), 'b q (h g) d -> b h (g q) d', h=kv_heads)
  k, v = (rearrange(array, 'b k h d -> b h k d') for array in (k, v))
  scores = jnp.einsum('bhqd,bhkd->bhqk', q, k, preferred_element_type=jnp.float32)
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = rearrange(scores, 'b h (g q) k -> b h g q k', g=groups)
  mask = mask[:, None, None]
  if sinks is not None:
    scores, mask = _with_sinks(scores, mask, rearrange(sinks, '(h g) -> h g', g=groups))
  weights = masked_softmax(scores, mask, v.dtype)
  weights = weights if sinks is None else weights[..., :-1]
  y = jnp.einsum('bhqk,bhkd->bhqd', rearrange(weights, 'b h g q k -> b h (g q) k'), v)
  return rearrange(y, 'b h (g q) d -> b q (h g) d', g=groups).astype(q.dtype)


def _with_sinks(
  scores: jax.Array, mask: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Scores [b, h, g, q, k] and their mask with one more key, whose score is sinks [h, g]."""
  last = jnp.broadcast_to(
    sinks.astype(scores.dtype)[None, :, :, None, None], (*scores.shape[:4], 1)
  )
  seen = jnp.ones((*mask.shape[:4], 1), bool)
  return jnp.concatenate([scores, last], axis=-1), jnp.concatenate([mask, seen], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def masked_softmax(scores: jax.Array, mask: jax.Array, dtype: Any) -> jax.Array:
  """Softmax over the last axis where `mask` is true, computed in float32, returned as `dtype`.

  Its own gradient rule keeps the result and nothing else: 12 to 20 % less time for all of attention
  on CPU than where the mask is differentiated through.
  """
  scores = jnp.where(mask, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
  return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_forward(scores: jax.Array, mask: jax.Array, dtype: Any) -> tuple:
  weights = masked_softmax(scores, mask, dtype)
  return weights, (weights, jnp.zeros((0,), scores.dtype))


def _softmax_backward(dtype: Any, kept: tuple, change: jax.Array) -> tuple:
  del dtype
  weights, like = kept
  weights, change = weights.astype(jnp.float32), change.astype(jnp.float32)
  scores = weights * (change - jnp.sum(weights * change, axis=-1, keepdims=True))
  return scores.astype(like.dtype), None


masked_softmax.defvjp(_softmax_forward, _softmax_backward)

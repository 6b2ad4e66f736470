"""The gated delta rule over a text, in chunks: most of it is products of matrices."""

from __future__ import annotations

from einops import rearrange
import jax
import jax.numpy as jnp

Carry = tuple[jax.Array, jax.Array]  # state, the segment that it is of


def delta_rule(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  decay: jax.Array,
  beta: jax.Array,
  *,
  state: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
  """Per token S = exp(g) S, S = S + k (beta (v - S^T k))^T, y = S^T q, from S = 0 on.

  Gated Delta Networks (https://arxiv.org/abs/2412.06464, section 3.3): within a chunk the writes
  solve a triangular system; between chunks the state is carried.

  Args:
    q: [batch, length, heads, key_dim] float32.
    k: likewise.
    v: [batch, length, heads, value_dim] float32.
    decay: g, [batch, length, heads] float32, at most 0.
    beta: [batch, length, heads] float32.
    state: S before the first token, [batch, heads, key_dim, value_dim]; None: 0.
    segment_ids: [batch, length] int; each segment, a run of equal numbers, begins with S = 0.
    chunk: tokens at once.

  Returns:
    y [batch, length, heads, value_dim] and S after the last token.
  """
  batch, length, heads, key_dim = k.shape
  if state is None:
    state = jnp.zeros((batch, heads, key_dim, v.shape[-1]), jnp.float32)
  segments = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
  size = min(chunk, length)
  more = -length % size
  # A padded token writes nothing, keeps all, and belongs to the last segment.
  pad = [jnp.pad(a, ((0, 0), (0, more)) + ((0, 0),) * (a.ndim - 2)) for a in (q, k, v, decay, beta)]
  segments = jnp.pad(segments, ((0, 0), (0, more)), mode='edge')
  qs, ks, vs = (rearrange(a, 'b (n c) h d -> n b h c d', c=size) for a in pad[:3])
  gs, betas = (rearrange(a, 'b (n c) h -> n b h c', c=size) for a in pad[3:])
  ids = rearrange(segments, 'b (n c) -> n b c', c=size)
  carry = (state, segments[:, 0])
  (state, _), y = jax.lax.scan(_chunk, carry, (qs, ks, vs, gs, betas, ids))
  return rearrange(y, 'n b h c d -> b (n c) h d')[:, :length], state


def _chunk(carry: Carry, xs: tuple[jax.Array, ...]) -> tuple[Carry, jax.Array]:
  state, segment = carry
  q, k, v, g, beta, ids = xs
  size = g.shape[-1]
  total = jnp.cumsum(g, axis=-1)
  rows, columns = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
  seen = (ids[:, :, None] == ids[:, None, :]) & (rows >= columns)[None]
  # Masked before exp: above the diagonal it would overflow.
  span = jnp.where(seen[:, None], total[..., :, None] - total[..., None, :], -jnp.inf)
  kept = jnp.exp(span)
  from_state = jnp.where((ids == segment[:, None])[:, None], jnp.exp(total), 0.0)[..., None]
  overlap = jnp.where((rows > columns)[None, None], jnp.einsum('bhid,bhjd->bhij', k, k) * kept, 0.0)
  system = beta[..., None] * overlap + jnp.eye(size)[None, None]
  known = beta[..., None] * (v - from_state * (k @ state))
  writes = jax.scipy.linalg.solve_triangular(system, known, lower=True, unit_diagonal=True)
  y = from_state * (q @ state) + (jnp.einsum('bhid,bhjd->bhij', q, k) * kept) @ writes
  to_end = kept[..., -1, :, None]
  state = from_state[..., -1:, :] * state + jnp.swapaxes(k * to_end, -1, -2) @ writes
  return (state, ids[:, -1]), y

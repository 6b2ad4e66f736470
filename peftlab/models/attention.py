"""Grouped-query attention with rotary positions, windows, segments, and an optional KV cache."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _parts, _points, _specs
from peftlab.models import rope, scores
from peftlab.models.config import DecoderConfig, LayerKind
from peftlab.models.layers import Dense, RMSNorm, unit_rms

Keys = tuple[jax.Array, jax.Array, jax.Array]  # keys, values, positions of both
CACHE_AXES = ('batch', 'length', 'kv_heads', 'head_dim')


class Attention(nnx.Module):
  """Causal self-attention (grouped queries: Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

  Attributes:
    q, k, v: Dense embed -> heads, head_dim. With an output gate q has twice the head_dim: query,
      then gate. No v where values are the keys; neither k nor v where an earlier layer's are read.
    o: Dense heads, head_dim -> embed.
    keys, values: the points where keys and values [batch, length, kv_heads, head_dim] may get
      virtual ones before them, which every token sees and rope does not turn; None where layers
      read the keys of others.
    q_norm, k_norm: RMSNorm over head_dim, or None.
    sinks: [q_heads], a logit per head that has no value, or None.
    rope_frequencies: [rotated / 2], this layer's own.
    window: [] int32, this layer's own (0: none), or None where no layer has one.
    cached_k, cached_v: [batch, cache, kv_heads, head_dim] or None; slot i is position i.
  """

  def __init__(self, config: DecoderConfig, kind: LayerKind | None = None, *, rngs: nnx.Rngs):
    c, dtype = config, jnp.dtype(config.dtype)
    kind = c.kind(0) if kind is None else kind
    self._projections(c, kind, rngs)
    own = not c.shared_keys
    self.keys = _points.Point('k', role='prefix') if own else None
    self.values = _points.Point('k' if self.v is None else 'v', role='prefix') if own else None
    norm: dict[str, Any] = dict(eps=c.norm_eps, unit_offset=c.norm_unit_offset, dtype=dtype)
    self.q_norm = RMSNorm(kind.head_dim, **norm) if c.qk_norm else None
    self.k_norm = RMSNorm(kind.head_dim, **norm) if c.qk_norm and not kind.reads_keys else None
    zeros = jnp.zeros((c.q_heads,), dtype)
    self.sinks = nnx.Param(zeros, axes=('q_heads',)) if c.sinks else None
    frequencies = rope.inverse_frequencies(c.rope, c.rope_dims or kind.head_dim)
    self.rope_frequencies = _parts.Constant(jnp.asarray(frequencies), axes=(None,))
    self.window = _parts.Constant(jnp.zeros((), jnp.int32), axes=()) if c.windows else None
    self.cached_k: nnx.Cache | None = nnx.data(None)
    self.cached_v: nnx.Cache | None = nnx.data(None)
    self.config = config
    self.kind = kind

  def _projections(self, c: DecoderConfig, kind: LayerKind, rngs: nnx.Rngs) -> None:
    embed, head_dim = {'embed': c.embed}, kind.head_dim
    q_axes = {'q_heads': c.q_heads, 'head_dim': head_dim}
    kv_axes = {'kv_heads': kind.kv_heads, 'head_dim': head_dim}
    q_and_gate = q_axes | {'head_dim': 2 * head_dim} if c.output_gate else q_axes
    more: dict[str, Any] = dict(dtype=jnp.dtype(c.dtype), rngs=rngs, role='attention')
    keys, values = not kind.reads_keys, not (kind.reads_keys or kind.keys_are_values)
    self.q = Dense(embed, q_and_gate, bias=c.qkv_bias, **more)
    self.k = Dense(embed, kv_axes, bias=c.qkv_bias, **more) if keys else None
    self.v = Dense(embed, kv_axes, bias=c.qkv_bias, **more) if values else None
    self.o = Dense(q_axes, embed, bias=c.o_bias, **more)

  def __call__(
    self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
  ) -> jax.Array:
    """x [batch, length, embed] -> the same shape; see `Decoder.__call__` for the arguments."""
    return self.attend(x, positions, segment_ids, self.keys_and_values(x, positions))

  def keys_and_values(self, x: jax.Array, positions: jax.Array) -> Keys:
    """What the tokens of x, and with a cache those before them, offer to be attended to."""
    assert self.k is not None
    flat = rearrange(x, 'b l e -> (b l) e')
    k = _heads(self.k(flat), x.shape)
    v = k if self.v is None else _heads(self.v(flat), x.shape)
    if self.k_norm is not None:
      k = self.k_norm(k)
    if self.config.value_norm:
      v = unit_rms(v, self.config.norm_eps)
    first, k, v = self._with_virtual(k, v)
    count = 0 if first is None else first[0].shape[1]
    places = positions + count if count else positions
    k = _specs.constrain(self._rotated(k, places), ('batch', 'length', 'kv_heads', 'head_dim'))
    v = _specs.constrain(v, ('batch', 'length', 'kv_heads', 'head_dim'))
    k, v, places = self._extend(k, v, positions)
    if first is None:
      return k, v, places
    before = jnp.broadcast_to(jnp.arange(count), (places.shape[0], count))
    places = jnp.concatenate([before, places + count], axis=1)
    k, v = (jnp.concatenate(pair, axis=1) for pair in zip(first, (k, v), strict=True))
    return k, v, places

  def attend(
    self,
    x: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    keys: Keys,
  ) -> jax.Array:
    """The output for x [batch, length, embed], from keys and values of this or another layer."""
    c = self.config
    k, v, k_positions = keys
    q = _heads(self.q(rearrange(x, 'b l e -> (b l) e')), x.shape)
    gate = None
    if c.output_gate:
      q, gate = jnp.split(q, 2, axis=-1)
    if self.q_norm is not None:
      q = self.q_norm(q)
    if count := self._before(k, x):
      positions = positions + count
    q = _specs.constrain(self._rotated(q, positions), scores.HEADS)
    window = None if self.window is None else self.window[...]
    mask = scores.causal_mask(positions, k_positions, segment_ids, window)
    scale = q.shape[-1] ** -0.5 if c.attention_scale is None else c.attention_scale
    sinks = None if self.sinks is None else self.sinks[...]
    y = scores.attend(q, k, v, mask, scale=scale, softcap=c.attention_softcap, sinks=sinks)
    y = _specs.constrain(y, scores.HEADS)
    if gate is not None:
      y = y * jax.nn.sigmoid(gate)
    y = self.o(rearrange(y, 'b l h d -> (b l) h d'))
    return rearrange(y, '(b l) e -> b l e', b=x.shape[0])

  def _with_virtual(
    self, k: jax.Array, v: jax.Array
  ) -> tuple[tuple[jax.Array, jax.Array] | None, jax.Array, jax.Array]:
    """(virtual keys and values or None, k, v) as the points make them of k and v."""
    if self.keys is None or self.values is None:
      return None, k, v
    more_k, more_v = self.keys(k), self.values(v)
    count, other = _points.added(k, more_k), _points.added(v, more_v)
    if count != other:
      raise ValueError(
        f'A layer has {count} virtual keys and {other} virtual values; expected equally many: an '
        "adapter with rows of its own goes on both points, 'keys' and 'values'."
      )
    if not count:
      return None, more_k, more_v
    first = more_k[:, :count], more_v[:, :count]
    return first, more_k[:, count:], more_v[:, count:]

  def _before(self, k: jax.Array, x: jax.Array) -> int:
    """How many virtual keys stand before those that x and a cache give."""
    if self.keys is None:
      return 0
    return k.shape[1] - (x if self.cached_k is None else self.cached_k).shape[1]

  def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    c = self.config
    cos, sin = rope.angles(positions, self.rope_frequencies[...], c.rope.amplitude)
    return rope.rotate(x, cos, sin, layout=c.rope_layout)

  def _extend(self, k: jax.Array, v: jax.Array, positions: jax.Array) -> Keys:
    """Keys, values and positions to attend to; with a cache, writes k and v into it first."""
    if self.cached_k is None or self.cached_v is None:
      return k, v, positions
    extend(self.cached_k, k, positions, axes=CACHE_AXES)
    extend(self.cached_v, v, positions, axes=CACHE_AXES)
    slots = self.cached_k[...].shape[1]
    # A slot that is not yet written lies behind every query, so causality hides it.
    return self.cached_k[...], self.cached_v[...], jnp.arange(slots)[None, :]

  def init_cache(self, lead: tuple[int, ...], batch: int, length: int) -> None:
    """Gives the layers of a stack, `lead` many, an empty cache each, in place."""
    if self.kind.reads_keys:
      return
    shape = (batch, length, self.kind.kv_heads, self.kind.head_dim)
    dtype = jnp.dtype(self.config.dtype)
    self.cached_k = empty_cache(lead, shape, dtype=dtype, axes=CACHE_AXES)
    self.cached_v = empty_cache(lead, shape, dtype=dtype, axes=CACHE_AXES)


def empty_cache(
  lead: tuple[int, ...], shape: tuple[int, ...], *, dtype: Any, axes: tuple[str, ...]
) -> nnx.Cache:
  """Zeros [*lead, *shape], `lead` counting layers."""
  stack: dict[str, Any] = {'stack': tuple(range(len(lead)))} if len(lead) > 1 else {}
  return nnx.Cache(jnp.zeros((*lead, *shape), dtype), axes=('layers',) * len(lead) + axes, **stack)


def extend(
  cache: nnx.Variable, new: jax.Array, positions: jax.Array, *, axes: tuple[str, ...]
) -> None:
  """Writes `new` [batch, length, ...] into the slots of a cache that `positions` name.

  A negative position is that of no token: it is not written.
  """
  old = cache[...]
  batch, slots = old.shape[:2]
  where = jnp.broadcast_to(jnp.where(positions < 0, slots, positions), new.shape[:2])
  rows = jnp.broadcast_to(jnp.arange(batch)[:, None], where.shape)
  filled = old.at[rows, where].set(new.astype(old.dtype), mode='drop')
  cache[...] = _specs.constrain(filled, axes, output=True)


def _heads(y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return rearrange(y, '(b l) h d -> b l h d', b=shape[0])

"""Multi-head latent attention: keys and values are made from one small vector per token."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _parts, _specs
from peftlab.models import rope, scores
from peftlab.models.attention import empty_cache, extend
from peftlab.models.config import DecoderConfig, Latent
from peftlab.models.layers import Dense, RMSNorm

CACHE_AXES = ('batch', 'length', 'kv_rank')


class LatentAttention(nnx.Module):
  """Causal self-attention of DeepSeek-V2 (https://arxiv.org/abs/2405.04434, section 2.1).

  Attributes:
    q: Dense embed -> heads, nope + rope; or, where queries are of low rank too, q_down: Dense
      embed -> q_rank, q_norm, and q_up: Dense q_rank -> heads, nope + rope.
    kv_down: Dense embed -> kv_rank + rope; the last are one key for all heads.
    kv_norm: RMSNorm over kv_rank.
    kv_up: Dense kv_rank -> heads, nope + value_dim.
    o: Dense heads, value_dim -> embed.
    rope_frequencies: [rope / 2].
    cached_latent, cached_key: [batch, cache, kv_rank] and [batch, cache, rope] or None: a cache of
      these is smaller than one of keys and values.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    assert config.latent is not None
    c, o, dtype = config, config.latent, jnp.dtype(config.dtype)
    embed = {'embed': c.embed}
    q_axes = {'q_heads': c.q_heads, 'head_dim': o.nope_dim + o.rope_dim}
    more: dict[str, Any] = dict(dtype=dtype, rngs=rngs, role='attention')
    low, rank = o.q_rank is not None, o.q_rank or 1
    self.q = None if low else Dense(embed, q_axes, **more)
    self.q_down = Dense(embed, {'q_rank': rank}, bias=c.qkv_bias, **more) if low else None
    self.q_norm = RMSNorm(rank, eps=o.norm_eps, dtype=dtype) if low else None
    self.q_up = Dense({'q_rank': rank}, q_axes, **more) if low else None
    self.kv_down = Dense(embed, {'kv_rank': o.kv_rank + o.rope_dim}, bias=c.qkv_bias, **more)
    self.kv_norm = RMSNorm(o.kv_rank, eps=o.norm_eps, dtype=dtype)
    kv_axes = {'q_heads': c.q_heads, 'head_dim': o.nope_dim + o.value_dim}
    self.kv_up = Dense({'kv_rank': o.kv_rank}, kv_axes, **more)
    values = {'q_heads': c.q_heads, 'head_dim': o.value_dim}
    self.o = Dense(values, embed, bias=c.o_bias, **more)
    frequencies = rope.inverse_frequencies(c.rope, o.rope_dim)
    self.rope_frequencies = _parts.Constant(jnp.asarray(frequencies), axes=(None,))
    self.cached_latent: nnx.Cache | None = nnx.data(None)
    self.cached_key: nnx.Cache | None = nnx.data(None)
    self.config = config

  @property
  def options(self) -> Latent:
    """Its sizes."""
    assert self.config.latent is not None
    return self.config.latent

  def __call__(
    self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
  ) -> jax.Array:
    """x [batch, length, embed] -> the same shape; see `Decoder.__call__` for the arguments."""
    c, o = self.config, self.options
    flat = rearrange(x, 'b l e -> (b l) e')
    cos, sin = rope.angles(positions, self.rope_frequencies[...], c.rope.amplitude)
    q = rearrange(self._queries(flat), '(b l) h d -> b l h d', b=x.shape[0])
    turned = rope.rotate(q[..., o.nope_dim :], cos, sin, layout=c.rope_layout)
    q = jnp.concatenate([q[..., : o.nope_dim], turned], axis=-1)
    down = rearrange(self.kv_down(flat), '(b l) r -> b l r', b=x.shape[0])
    latent = self.kv_norm(down[..., : o.kv_rank])
    key = rope.rotate(down[..., None, o.kv_rank :], cos, sin, layout=c.rope_layout)[..., 0, :]
    latent, key, k_positions = self._extend(latent, key, positions)
    k, v = self._keys_and_values(latent, key)
    q, k, v = (_specs.constrain(array, scores.HEADS) for array in (q, k, v))
    mask = scores.causal_mask(positions, k_positions, segment_ids)
    scale = q.shape[-1] ** -0.5 if c.attention_scale is None else c.attention_scale
    y = scores.attend(q, k, v, mask, scale=scale, softcap=c.attention_softcap)
    y = _specs.constrain(y, scores.HEADS)
    y = self.o(rearrange(y, 'b l h d -> (b l) h d'))
    return rearrange(y, '(b l) e -> b l e', b=x.shape[0])

  def _queries(self, flat: jax.Array) -> jax.Array:
    if self.q is not None:
      return self.q(flat)
    assert self.q_down is not None
    assert self.q_norm is not None
    assert self.q_up is not None
    return self.q_up(self.q_norm(self.q_down(flat)))

  def _keys_and_values(self, latent: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From [batch, keys, kv_rank] and [batch, keys, rope], per head."""
    o = self.options
    up = self.kv_up(rearrange(latent, 'b l r -> (b l) r'))
    up = rearrange(up, '(b l) h d -> b l h d', b=latent.shape[0])
    one = jnp.broadcast_to(key[:, :, None, :], (*up.shape[:3], o.rope_dim))
    return jnp.concatenate([up[..., : o.nope_dim], one], axis=-1), up[..., o.nope_dim :]

  def _extend(
    self, latent: jax.Array, key: jax.Array, positions: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    if self.cached_latent is None or self.cached_key is None:
      return latent, key, positions
    extend(self.cached_latent, latent, positions, axes=CACHE_AXES)
    extend(self.cached_key, key, positions, axes=CACHE_AXES)
    slots = self.cached_latent[...].shape[1]
    return self.cached_latent[...], self.cached_key[...], jnp.arange(slots)[None, :]

  def init_cache(self, lead: tuple[int, ...], batch: int, length: int) -> None:
    """Gives the layers of a stack, `lead` many, an empty cache each, in place."""
    o, dtype = self.options, jnp.dtype(self.config.dtype)
    shapes = ((batch, length, o.kv_rank), (batch, length, o.rope_dim))
    self.cached_latent = empty_cache(lead, shapes[0], dtype=dtype, axes=CACHE_AXES)
    self.cached_key = empty_cache(lead, shapes[1], dtype=dtype, axes=CACHE_AXES)

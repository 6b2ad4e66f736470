"""The gated delta net: attention whose keys and values are folded into a state of fixed size."""

from __future__ import annotations

from typing import Any

from einops import rearrange, repeat
from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _specs
from peftlab.models.attention import empty_cache
from peftlab.models.config import DecoderConfig, Delta
from peftlab.models.delta_rule import delta_rule
from peftlab.models.layers import Dense, RMSNorm

STATE_AXES = ('batch', 'q_heads', 'head_dim', 'value_dim')
INPUT_AXES = ('batch', 'length', 'channels')
_L2_EPS = 1e-6


class DeltaNet(nnx.Module):
  """The mixer of most layers of Qwen3-Next (Yang et al. 2024, https://arxiv.org/abs/2412.06464).

  Attributes:
    qkvz: Dense embed -> key heads, (query, key, its value heads' values, their gates).
    ba: Dense embed -> key heads, (its value heads' write strengths, their decays).
    conv: [channels, 1, window], a causal convolution of queries, keys and values, each channel its
      own.
    a_log, dt_bias: [value_heads]: decay = exp(-exp(a_log) softplus(a + dt_bias)).
    norm: RMSNorm over value_dim, of the output.
    out: Dense value heads, value_dim -> embed.
    cached_state: [batch, value_heads, key_dim, value_dim] float32, or None.
    cached_inputs: [batch, window - 1, channels], what the convolution saw last, or None.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    assert config.delta is not None
    c, o, dtype = config, config.delta, jnp.dtype(config.dtype)
    embed, each = {'embed': c.embed}, o.value_heads // o.key_heads
    more: dict[str, Any] = dict(dtype=dtype, rngs=rngs, role='attention')
    per_key = 2 * o.key_dim + 2 * each * o.value_dim
    self.qkvz = Dense(embed, {'kv_heads': o.key_heads, 'head_dim': per_key}, **more)
    self.ba = Dense(embed, {'kv_heads': o.key_heads, 'head_dim': 2 * each}, **more)
    shape = (channels(o), 1, o.window)
    values = jax.random.normal(rngs.params(), shape, dtype)
    values = values * jnp.asarray(o.window**-0.5, dtype)
    self.conv = nnx.Param(values, axes=('channels', None, None))
    self.a_log = nnx.Param(jnp.zeros((o.value_heads,), dtype), axes=('q_heads',))
    self.dt_bias = nnx.Param(jnp.ones((o.value_heads,), dtype), axes=('q_heads',))
    self.norm = RMSNorm(o.value_dim, eps=c.norm_eps, dtype=dtype)
    self.out = Dense({'q_heads': o.value_heads, 'head_dim': o.value_dim}, embed, **more)
    self.cached_state: nnx.Cache | None = nnx.data(None)
    self.cached_inputs: nnx.Cache | None = nnx.data(None)
    self.config = config

  @property
  def options(self) -> Delta:
    """Its sizes."""
    assert self.config.delta is not None
    return self.config.delta

  def __call__(
    self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
  ) -> jax.Array:
    """x [batch, length, embed] -> the same shape; see `Decoder.__call__` for the arguments.

    Order is all it knows of positions. With a cache a negative one is that of no token: it leaves
    the state as it is. Such tokens must stand behind all others.
    """
    o = self.options
    flat = rearrange(x, 'b l e -> (b l) e')
    qkv, z = self._projected(flat, x.shape[0])
    valid = None
    if self.cached_state is not None:
      valid = jnp.broadcast_to(positions >= 0, x.shape[:2])
    qkv = jax.nn.silu(self._convolved(qkv, segment_ids, valid))
    q, k, v = jnp.split(qkv, (o.key_heads * o.key_dim, 2 * o.key_heads * o.key_dim), axis=-1)
    each = o.value_heads // o.key_heads
    q, k = (repeat(a, 'b l (h d) -> b l (h each) d', h=o.key_heads, each=each) for a in (q, k))
    v = rearrange(v, 'b l (h d) -> b l h d', h=o.value_heads)
    beta, decay = self._beta_and_decay(flat, x.shape[0])
    if valid is not None:
      beta = jnp.where(valid[:, :, None], beta, 0.0)
      decay = jnp.where(valid[:, :, None], decay, 0.0)
    heads = ('batch', 'length', 'q_heads', 'head_dim')
    q, k, v = (_specs.constrain(array.astype(jnp.float32), heads) for array in (q, k, v))
    q, k = _unit(q) * o.key_dim**-0.5, _unit(k)
    state = None if self.cached_state is None else self.cached_state[...]
    y, state = delta_rule(q, k, v, decay, beta, state=state, segment_ids=segment_ids, chunk=o.chunk)
    if self.cached_state is not None:
      self.cached_state[...] = _specs.constrain(state, STATE_AXES, output=True)
    y = self.norm(y.astype(x.dtype)) * jax.nn.silu(z)
    y = self.out(rearrange(y, 'b l h d -> (b l) h d'))
    return rearrange(y, '(b l) e -> b l e', b=x.shape[0])

  def _projected(self, flat: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
    """(queries, keys and values [batch, length, channels], gates [.., value_heads, value_dim])."""
    o = self.options
    each = o.value_heads // o.key_heads
    cuts = (o.key_dim, 2 * o.key_dim, 2 * o.key_dim + each * o.value_dim)
    *qkv, z = jnp.split(self.qkvz(flat), cuts, axis=-1)
    sides = [rearrange(array, '(b l) h d -> b l (h d)', b=batch) for array in qkv]
    z = rearrange(z, '(b l) h (each d) -> b l (h each) d', b=batch, each=each)
    return jnp.concatenate(sides, axis=-1), z

  def _beta_and_decay(self, flat: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
    """How strongly each token writes, and the logarithm of what is kept: [batch, length, heads]."""
    both = rearrange(self.ba(flat), '(b l) h (two each) -> two b l (h each)', b=batch, two=2)
    b, a = both.astype(jnp.float32)
    bias, rate = (v[...].astype(jnp.float32)[None, None, :] for v in (self.dt_bias, self.a_log))
    return jax.nn.sigmoid(b), -jnp.exp(rate) * jax.nn.softplus(a + bias)

  def _convolved(
    self, u: jax.Array, segment_ids: jax.Array | None, valid: jax.Array | None
  ) -> jax.Array:
    """The causal convolution of u [batch, length, channels] within each segment."""
    before, length = self.options.window - 1, u.shape[1]
    if self.cached_inputs is None:
      past = jnp.zeros((u.shape[0], before, u.shape[2]), u.dtype)
    else:
      past = self.cached_inputs[...].astype(u.dtype)
    seen = jnp.concatenate([past, u], axis=1)
    if self.cached_inputs is not None and valid is not None:
      rows = jnp.sum(valid, axis=1)[:, None] + jnp.arange(before)[None, :]
      kept = jnp.take_along_axis(seen, rows[:, :, None], axis=1)
      kept = kept.astype(self.cached_inputs.dtype)
      self.cached_inputs[...] = _specs.constrain(kept, INPUT_AXES, output=True)
    kernel, y = self.conv[...].astype(u.dtype), jnp.zeros_like(u)
    for tap in range(before + 1):
      part = seen[:, tap : tap + length]
      if segment_ids is not None:
        ids = jnp.pad(segment_ids, ((0, 0), (before, 0)), constant_values=-1)
        same = ids[:, tap : tap + length] == segment_ids
        part = jnp.where(same[:, :, None], part, jnp.zeros((), u.dtype))
      y = y + part * kernel[None, None, :, 0, tap]
    return y

  def init_cache(self, lead: tuple[int, ...], batch: int, length: int) -> None:
    """Gives the layers of a stack, `lead` many, an empty state each, in place."""
    del length
    o = self.options
    shape = (batch, o.value_heads, o.key_dim, o.value_dim)
    self.cached_state = empty_cache(lead, shape, dtype=jnp.float32, axes=STATE_AXES)
    shape = (batch, o.window - 1, channels(o))
    dtype = jnp.dtype(self.config.dtype)
    self.cached_inputs = empty_cache(lead, shape, dtype=dtype, axes=INPUT_AXES)


def channels(options: Delta) -> int:
  """How many numbers per token the convolution sees: queries, keys, values."""
  o = options
  return 2 * o.key_heads * o.key_dim + o.value_heads * o.value_dim


def _unit(x: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)

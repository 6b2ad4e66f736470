"""The decoder: embedding, a stack of blocks run by an applier, norm, head."""

from __future__ import annotations

import dataclasses
from typing import Any

from einops import rearrange
from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _parts, _registry, _specs, _stack, appliers
from peftlab.models import rope
from peftlab.models.attention import Attention
from peftlab.models.config import DecoderConfig
from peftlab.models.layers import Dense, Embedding, RMSNorm

ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu': lambda x: jax.nn.gelu(x, approximate=False),
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
}


class GatedMLP(nnx.Module):
  """down(activation(gate(x)) * up(x)): SwiGLU or GeGLU (https://arxiv.org/abs/2002.05202)."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    c = config
    embed, mlp = {'embed': c.embed}, {'mlp': c.mlp}
    options = dict(bias=c.mlp_bias, dtype=jnp.dtype(c.dtype), rngs=rngs)
    self.gate = Dense(embed, mlp, **options)
    self.up = Dense(embed, mlp, **options)
    self.down = Dense(mlp, embed, **options)
    self.activation = c.activation

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, length, embed] -> the same shape."""
    flat = rearrange(x, 'b l e -> (b l) e')
    hidden = ACTIVATIONS[self.activation](self.gate(flat)) * self.up(flat)
    hidden = rearrange(hidden, '(b l) m -> b l m', b=x.shape[0])
    hidden = _specs.constrain(hidden, ('batch', 'length', 'mlp'))
    y = self.down(rearrange(hidden, 'b l m -> (b l) m'))
    return rearrange(y, '(b l) e -> b l e', b=x.shape[0])


class Block(nnx.Module):
  """x + attention, then x + MLP, each behind a norm (and before one, with post_norms)."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    def norm() -> RMSNorm:
      return _norm(config)

    self.attn_norm, self.mlp_norm = norm(), norm()
    self.attn = Attention(config, rngs=rngs)
    self.mlp = GatedMLP(config, rngs=rngs)
    self.post_attn_norm = norm() if config.post_norms else None
    self.post_mlp_norm = norm() if config.post_norms else None

  def __call__(
    self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
  ) -> jax.Array:
    """x [batch, length, embed] -> the same shape and dtype."""
    y = self.attn(self.attn_norm(x), positions, segment_ids)
    x = x + (self.post_attn_norm(y) if self.post_attn_norm else y)
    x = _specs.constrain(x, ('batch', 'length', 'embed'))
    y = self.mlp(self.mlp_norm(x))
    x = x + (self.post_mlp_norm(y) if self.post_mlp_norm else y)
    return _specs.constrain(x, ('batch', 'length', 'embed'))


def _norm(config: DecoderConfig) -> RMSNorm:
  return RMSNorm(
    config.embed,
    eps=config.norm_eps,
    unit_offset=config.norm_unit_offset,
    dtype=jnp.dtype(config.dtype),
  )


def run_block(
  block: Block, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
  """The body that an applier runs for each layer."""
  return block(x, positions, segment_ids)


class Decoder(nnx.Module):
  """A decoder-only language model.

  Attributes:
    embed: Embedding [vocab, embed].
    layers: one Block with every array stacked over layers at axis 0.
    norm: RMSNorm.
    head: Dense embed -> vocab, or None where the embedding is the head.
    config: its DecoderConfig.
    applier: runs the stack.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, applier: Any = None):
    """A decoder with random weights; `peftlab.load_model` makes one from files."""
    dtype = jnp.dtype(config.dtype)
    self.embed = Embedding(config.vocab, config.embed, dtype=dtype, rngs=rngs)
    layers: Any = _stack.stack(lambda rngs: Block(config, rngs=rngs), config.layers, rngs=rngs)
    for name, values in layer_constants(config).items():
      getattr(layers.attn, name)[...] = values
    self.layers = layers
    self.norm = _norm(config)
    head = ({'embed': config.embed}, {'vocab': config.vocab})
    self.head = None if config.tied else Dense(*head, dtype=dtype, rngs=rngs)
    self.config = config
    self.applier = appliers.Scan() if applier is None else applier

  def __call__(
    self,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Next-token logits.

    Args:
      tokens: [batch, length] int.
      positions: [batch or 1, length] int, 0 and above; default: 0, 1, 2, ... With a cache they are
        needed, and say where the new keys and values go.
      segment_ids: [batch, length] int: a token sees only tokens of its own segment.

    Returns:
      [batch, length, vocab] float32.

    Raises:
      ValueError: arguments of the wrong shape, or a cache without positions or with segments.
    """
    return self.logits(self.hidden(tokens, positions=positions, segment_ids=segment_ids))

  def hidden(
    self,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """What the head reads, [batch, length, embed]; arguments as in `__call__`."""
    positions = self._positions(tokens, positions, segment_ids)
    x = self.embed(tokens)
    x = x * jnp.asarray(self.config.embed_scale, x.dtype)
    x = _specs.constrain(x, ('batch', 'length', 'embed'))
    x, layers = self.applier.run(self.layers, x, run_block, positions, segment_ids)
    if layers is not self.layers:  # a layer made or replaced a Variable
      self.layers = layers
    return self.norm(x)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Logits [..., vocab] float32 of hidden states [..., embed]."""
    head = self.embed.attend if self.head is None else self.head
    logits = head(hidden).astype(jnp.float32)
    logits = _specs.constrain(logits, ('batch', 'length', 'vocab'), output=True)
    cap = self.config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)

  @property
  def tied(self) -> bool:
    """Whether the embedding is also the head."""
    return self.head is None

  def untie(self) -> None:
    """Gives a tied head a kernel of its own, in place: the table, transposed."""
    if self.head is not None:
      return
    c = self.config
    head = nnx.eval_shape(
      lambda: Dense(
        {'embed': c.embed}, {'vocab': c.vocab}, dtype=jnp.dtype(c.dtype), rngs=nnx.Rngs(0)
      )
    )
    head.kernel.set_raw_value(self.embed.table[...].T)
    self.head = nnx.data(head)
    self.config = dataclasses.replace(c, tied=False)

  def init_cache(self, batch: int, length: int) -> Decoder:
    """A decoder on the same arrays with an empty KV cache for `batch` texts of `length` tokens.

    Its calls need `positions`, and write keys and values at them; a text must be filled from 0
    without gaps (a padded token is overwritten by the one that takes its position).

    Raises:
      ValueError: batch or length below 1, or length above the config's max_length.
    """
    c = self.config
    if batch < 1 or not 1 <= length <= c.max_length:
      raise ValueError(
        f'A cache for {batch} texts of {length} tokens was asked for; the batch must be at least '
        f'1 and the length between 1 and max_length ({c.max_length}).'
      )
    model: Any = _parts.merge(_parts.split(self))
    shape = (c.layers, batch, length, c.kv_heads, c.head_dim)
    axes = ('layers', 'batch', 'length', 'kv_heads', 'head_dim')
    for name in ('cached_k', 'cached_v'):
      empty = jnp.zeros(shape, jnp.dtype(c.dtype))
      setattr(model.layers.attn, name, nnx.Cache(empty, axes=axes))
    return model

  def hf_names(self) -> dict[str, str]:
    """Its modules, layer by layer, -> the names they have in a checkpoint of its family.

    Returns:
      {'layers.0.attn.q': 'model.layers.0.self_attn.q_proj', ..., 'norm': 'model.norm'}; a tied head
      has no name.
    """
    held = {_parts.path_name(path[:-1]) for path in _parts.variables(self)}
    family = _registry.families.get(self.config.family)
    names = {}
    for ours, theirs in family.adapter_modules.items():
      if ours in held and '{layer}' not in theirs:
        names[ours] = theirs
      elif ours in held:
        for i in range(self.config.layers):
          names[ours.replace('layers', f'layers.{i}', 1)] = theirs.format(layer=i)
    return names

  def _positions(
    self, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
  ) -> jax.Array:
    if tokens.ndim != 2:
      raise ValueError(f'tokens have shape {tokens.shape}; expected [batch, length].')
    batch, length = tokens.shape
    if segment_ids is not None and segment_ids.shape != tokens.shape:
      raise ValueError(f'segment_ids have shape {segment_ids.shape}; expected {tokens.shape}.')
    if self.layers.attn.cached_k is not None:
      _check_cached(self.layers.attn.cached_k[...].shape, tokens, positions, segment_ids)
    if positions is None:
      return jnp.arange(length, dtype=jnp.int32)[None, :]
    if positions.shape not in ((batch, length), (1, length)):
      raise ValueError(f'positions have shape {positions.shape}; expected {tokens.shape}.')
    return positions


def _check_cached(
  cache: tuple[int, ...],
  tokens: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
) -> None:
  if positions is None:
    raise ValueError('positions are needed with a cache: they say where tokens go.')
  if segment_ids is not None:
    raise ValueError('segment_ids cannot be used with a cache: a cache holds one text per row.')
  if tokens.shape[0] != cache[1] or tokens.shape[1] > cache[2]:
    raise ValueError(
      f'tokens have shape {tokens.shape}; the cache is for batch {cache[1]} and length {cache[2]}.'
    )


def layer_constants(config: DecoderConfig) -> dict[str, jax.Array]:
  """The constants of attention that differ per layer, by name, each [layers, ...]."""
  ropes = [config.layer_rope(i) for i in range(config.layers)]
  frequencies = [rope.inverse_frequencies(r, config.head_dim) for r in ropes]
  constants = {'rope_frequencies': jnp.asarray(frequencies)}
  if config.windows:
    constants['window'] = jnp.asarray(config.windows, jnp.int32)
  return constants

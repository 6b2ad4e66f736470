"""A block: a mixer and an MLP behind norms; stacks of blocks, and stacks of periods of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _batch, _parts, _specs, _stack, appliers
from peftlab.models import rope
from peftlab.models.attention import Attention
from peftlab.models.config import DecoderConfig, LayerKind
from peftlab.models.delta_net import DeltaNet
from peftlab.models.groups import Group
from peftlab.models.latent_attention import LatentAttention
from peftlab.models.layers import Dense
from peftlab.models.mlp import ACTIVATIONS, ExpertMLP, GatedMLP, MLPBesideExperts, norm_of

Context = Any


class Block(nnx.Module):
  """x + attention, then x + MLP, each behind a norm (and before one, with post_norms).

  Attributes:
    attn: Attention or LatentAttention; None where `delta` is the mixer.
    delta: DeltaNet or None.
    mlp: GatedMLP, ExpertMLP or MLPBesideExperts.
    attn_norm, mlp_norm, post_attn_norm, post_mlp_norm: RMSNorm or None.
    token_embed: TokenEmbed or None.
    scalar: [1], the stream is multiplied by it behind the block, or None.
  """

  def __init__(self, config: DecoderConfig, kind: LayerKind | None = None, *, rngs: nnx.Rngs):
    c = config
    kind = c.kind(0) if kind is None else kind
    beside = kind.experts and kind.mlp > 0
    self.attn_norm = norm_of(c)
    self.mlp_norm = None if beside else norm_of(c)
    self.attn = None if kind.mixer == 'delta' else _attention(c, kind, rngs)
    self.delta = DeltaNet(c, rngs=rngs) if kind.mixer == 'delta' else None
    self.mlp = _mlp(c, kind, rngs)
    self.post_attn_norm = norm_of(c) if c.post_norms else None
    self.post_mlp_norm = norm_of(c) if c.post_norms else None
    self.token_embed = TokenEmbed(c, rngs=rngs) if c.per_layer_embed else None
    ones = jnp.ones((1,), jnp.dtype(c.dtype))
    self.scalar = _parts.Constant(ones, axes=(None,)) if c.layer_scalar else None
    self.kind = kind

  @property
  def mixer(self) -> Any:
    """What mixes tokens: attention or the delta net."""
    return self.delta if self.attn is None else self.attn

  def __call__(
    self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None
  ) -> jax.Array:
    """x [batch, length, embed] -> the same shape and dtype."""
    y = self.mixer(self.attn_norm(x), positions, segment_ids)
    return self.add(x, y, segment_ids=segment_ids)

  def add(
    self,
    x: jax.Array,
    y: jax.Array,
    tokens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """The stream x behind the block, from what the mixer gave.

    Args:
      x: [batch, length, embed] in front of the block.
      y: the mixer's output.
      tokens: [batch, length, layers, size], what `token_embed` chooses from.
      segment_ids: [batch, length] int; 0 is padding, of which a router keeps no record.
    """
    x = x + (self.post_attn_norm(y) if self.post_attn_norm else y)
    x = _specs.constrain(x, ('batch', 'length', 'embed'))
    counted = () if segment_ids is None or not self.kind.experts else (segment_ids != 0,)
    y = self.mlp(self.mlp_norm(x) if self.mlp_norm else x, *counted)
    x = x + (self.post_mlp_norm(y) if self.post_mlp_norm else y)
    if self.token_embed is not None and tokens is not None:
      x = x + self.token_embed(x, tokens)
    if self.scalar is not None:
      x = x * self.scalar[...].astype(x.dtype)[None, None, :]
    return _specs.constrain(x, ('batch', 'length', 'embed'))


def _attention(c: DecoderConfig, kind: LayerKind, rngs: nnx.Rngs) -> nnx.Module:
  return LatentAttention(c, rngs=rngs) if kind.mixer == 'latent' else Attention(c, kind, rngs=rngs)


def _mlp(c: DecoderConfig, kind: LayerKind, rngs: nnx.Rngs) -> nnx.Module:
  if not kind.experts:
    return GatedMLP(c, rngs=rngs, width=kind.mlp)
  assert c.experts is not None
  return (MLPBesideExperts if kind.mlp else ExpertMLP)(c, c.experts, rngs=rngs)


class TokenEmbed(nnx.Module):
  """Adds a layer's own embedding of each token, gated by the stream (Gemma 3n and 4).

  Attributes:
    gate: Dense embed -> size.
    project: Dense size -> embed.
    norm: RMSNorm of the result.
    layer: [] int32, the number of the layer.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    embed, own = {'embed': config.embed}, {'token_embed': config.per_layer_embed}
    more: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), rngs=rngs, role='mlp')
    self.gate = Dense(embed, own, **more)
    self.project = Dense(own, embed, **more)
    self.norm = norm_of(config)
    self.layer = _parts.Constant(jnp.zeros((), jnp.int32), axes=())
    self.activation = config.activation

  def __call__(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """x [batch, length, embed], tokens [batch, length, layers, size] -> what is added to x."""
    own = jax.lax.dynamic_index_in_dim(tokens, self.layer[...], axis=2, keepdims=False)
    return self.norm(self.project(ACTIVATIONS[self.activation](self.gate(x)) * own))


class Period(nnx.Module):
  """One round of a pattern of layers.

  Attributes:
    runs: a stack of Blocks per run.
  """

  def __init__(self, config: DecoderConfig, group: Group, *, rngs: nnx.Rngs):
    self.runs = nnx.List([_blocks(config, *run, rngs=rngs) for run in group.runs])


def _blocks(config: DecoderConfig, kind: LayerKind, count: int, *, rngs: nnx.Rngs) -> nnx.Module:
  return _stack.stack(lambda rngs: Block(config, kind, rngs=rngs), count, rngs=rngs)


def make_group(config: DecoderConfig, group: Group, *, rngs: nnx.Rngs) -> nnx.Module:
  """The stack of a group: of Blocks, or of Periods."""
  if group.nested:
    return _stack.stack(lambda rngs: Period(config, group, rngs=rngs), group.repeats, rngs=rngs)
  return _blocks(config, *group.runs[0], rngs=rngs)


def blocks_in(layers: Any) -> list[tuple[tuple, Any]]:
  """Every stack of Blocks in `Decoder.layers`, as (path from the decoder, stack)."""
  if not isinstance(layers, nnx.List):
    return [(('layers',), layers)]
  found = []
  for i, group in enumerate(layers):
    if isinstance(group, Period):
      found += [(('layers', i, 'runs', j), run) for j, run in enumerate(group.runs)]
    else:
      found.append((('layers', i), group))
  return found


def run_block(block: Block, x: Any, *context: Any) -> Any:
  """The body that an applier runs for each layer.

  Args:
    block: one layer.
    x: [batch, length, embed]; or `Handed`, where keys are handed from layer to layer.
    *context: positions, segment_ids; embeddings that layers have of their own, or None; what
      adapters may ask about the batch, or None.
  """
  positions, segment_ids, tokens, batch = (*context, None, None)[:4]
  with _batch.offering(batch):
    return _run_block(block, x, positions, segment_ids, tokens)


def _run_block(
  block: Block,
  x: Any,
  positions: jax.Array,
  segment_ids: jax.Array | None,
  tokens: jax.Array | None,
) -> Any:
  if not isinstance(x, Handed):
    y = block.mixer(block.attn_norm(x), positions, segment_ids)
    return block.add(x, y, tokens, segment_ids)
  seen, attn = block.attn_norm(x.x), block.attn
  assert isinstance(attn, Attention)
  name = 'local' if block.kind.local else 'full'
  if not block.kind.reads_keys:
    k, v, places = attn.keys_and_values(seen, positions)
    places = jnp.broadcast_to(places, getattr(x, name)[2].shape)
    new: dict[str, Any] = {name: (k, v, places)}
    x = dataclasses.replace(x, **new)
  y = attn.attend(seen, positions, segment_ids, getattr(x, name))
  return dataclasses.replace(x, x=block.add(x.x, y, tokens, segment_ids))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handed:
  """A stream with the last keys, values and their positions of each type of layer."""

  x: jax.Array
  full: tuple[jax.Array, jax.Array, jax.Array]
  local: tuple[jax.Array, jax.Array, jax.Array]


def run_group(
  layers: Any, x: Any, context: tuple, *, applier: appliers.Applier
) -> tuple[Any, nnx.Module]:
  """`Applier.run` on one group: x behind it, and its stack as the layers left it."""
  if not isinstance(layers, Period):
    return applier.run(layers, x, run_block, *context)
  # The applier inside recomputes per layer, as it would without a pattern; the one outside that
  # runs whole periods need not do so again.
  once: dict[str, Any] = {'remat': 'none'} if hasattr(applier, 'remat') else {}
  outer = dataclasses.replace(applier, **once)
  known = isinstance(applier, (appliers.Scan, appliers.Sequential))
  inner = applier if known else appliers.Scan(remat=getattr(applier, 'remat', 'none'))

  def run_period(period: Period, x: Any, *context: Any) -> Any:
    for i, run in enumerate(period.runs):
      x, ran = inner.run(run, x, run_block, *context)
      if ran is not run:
        period.runs[i] = ran
    return x

  return outer.run(layers, x, run_period, *context)


def layer_constants(config: DecoderConfig, numbers: Any, kind: LayerKind) -> dict[tuple, jax.Array]:
  """The constants of a stack of Blocks, by path; `numbers` says which layers it holds."""
  found: dict[tuple, jax.Array] = {}
  if kind.mixer == 'latent':
    assert config.latent is not None
    frequencies = rope.inverse_frequencies(config.rope, config.latent.rope_dim)
    found['attn', 'rope_frequencies'] = jnp.broadcast_to(
      jnp.asarray(frequencies), (*numbers.shape, *frequencies.shape)
    )
  elif kind.mixer == 'attention':
    dims = config.rope_dims or kind.head_dim
    ropes = [rope.inverse_frequencies(config.layer_rope(int(i)), dims) for i in numbers.ravel()]
    found['attn', 'rope_frequencies'] = jnp.asarray(ropes).reshape(*numbers.shape, -1)
    if config.windows:
      windows = [config.windows[int(i)] for i in numbers.ravel()]
      found['attn', 'window'] = jnp.asarray(windows, jnp.int32).reshape(numbers.shape)
  if config.per_layer_embed:
    found['token_embed', 'layer'] = jnp.asarray(numbers, jnp.int32)
  return found

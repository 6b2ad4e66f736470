"""The decoder: embedding, a stack of blocks run by an applier, norm, head."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _layer, _parts, _points, _registry, _rows, _specs, _stack, appliers
from peftlab.models import attention, block, groups, inputs, virtual
from peftlab.models.config import DecoderConfig
from peftlab.models.layers import Dense, Embedding, RMSNorm
from peftlab.models.mlp import norm_of


class Decoder(nnx.Module):
  """A decoder-only language model.

  Attributes:
    embed: Embedding [vocab, embed].
    layers: one Block with every array stacked over layers at axis 0; or, where the layers are not
      all of one kind, an nnx.List of such stacks and of stacks of `block.Period` (`groups.groups`
      says which layers are where).
    norm: RMSNorm.
    head: Dense embed -> vocab, or None where the embedding is the head.
    token_embeds: TokenEmbeds, where layers have embeddings of their own, or None.
    inputs: the point where virtual tokens are put before the embedded ones; None where layers have
      embeddings of their own, for a virtual token has none.
    text: tokens [batch, length] in the cache, where an adapter asks for them, or None.
    virtual: how many virtual tokens stand in the cache before the text.
    config: its DecoderConfig.
    applier: runs each stack.
    cache: (batch, length) of its caches, or None.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, applier: Any = None):
    """A decoder with random weights; `peftlab.load_model` makes one from files."""
    dtype = jnp.dtype(config.dtype)
    self.embed = Embedding(config.vocab, config.embed, dtype=dtype, rngs=rngs)
    made = [block.make_group(config, group, rngs=rngs) for group in groups.groups(config)]
    plain = len(made) == 1 and not isinstance(made[0], block.Period)
    self.layers: Any = made[0] if plain else nnx.List(made)
    for path, value in constants(config).items():
      node: Any = self
      for key in path:
        node = node[key] if isinstance(key, int) else getattr(node, key)
      node[...] = value
    self.norm: RMSNorm = norm_of(config)
    self.head = None if config.tied else _head(config, rngs)
    own = bool(config.per_layer_embed)
    self.token_embeds = TokenEmbeds(config, rngs=rngs) if own else None
    point = _points.Point('embed', role='inputs', factor=float(config.embed_scale))
    self.inputs = None if own else point
    self.text: nnx.Cache | None = nnx.data(None)
    self.virtual = 0
    self.config = config
    self.applier = appliers.Scan() if applier is None else applier
    self.cache: tuple[int, int] | None = None

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
        needed, and say where the new keys and values go; -1 stands for no token (padding behind a
        text), which leaves the cache as it is.
      segment_ids: [batch, length] int: a token sees only tokens of its own segment.

    Returns:
      [batch, length, vocab] float32.

    Raises:
      ValueError: arguments of the wrong shape, a cache without positions or with segments, or,
        outside of a trace, a token or a position that the model does not have.
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
    _rows.check_batch(self, tokens.shape[0])
    x = self.embed(tokens)
    x = x * jnp.asarray(self.config.embed_scale, x.dtype)
    own = None if self.token_embeds is None else self.token_embeds(tokens, x)
    x, places = self._with_virtual(x, positions, segment_ids)
    x = _specs.constrain(x, ('batch', 'length', 'embed'))
    count = x.shape[1] - tokens.shape[1]
    batch = self._batch(tokens, positions, segment_ids, count)
    x = self._run_layers(x, (places, segment_ids, own, batch))
    return self.norm(x[:, count:] if count else x)

  def _with_virtual(
    self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Embedded tokens and positions with those of virtual tokens, which a cache holds already."""
    if self.cache is not None:
      return x, virtual.behind(positions, self.virtual) if self.virtual else positions
    y = x if self.inputs is None else self.inputs(x)
    count = _points.added(x, y)
    virtual.check_segments(self.config, count, segment_ids)
    virtual.check_length(self.config, count, x.shape[1])
    return y, virtual.with_virtual(positions, count) if count else positions

  def _batch(
    self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array | None, count: int
  ) -> virtual.Batch | None:
    """What the adapters may ask about the batch; None where none of them asks."""
    if not _layer.reads_batch(self):
      return None
    cached = None
    if self.cache is not None:
      if self.text is None:
        raise ValueError('The cache was made before an adapter that asks for the tokens was on.')
      attention.extend(self.text, tokens, positions, axes=('batch', 'length'))
      cached = self.text[...], positions
    return virtual.batch_of(tokens, count=count, segment_ids=segment_ids, cached=cached)

  def _run_layers(self, x: jax.Array, context: tuple) -> jax.Array:
    """x behind all layers."""
    if isinstance(self.layers, nnx.List):
      return self._run_groups(x, context)
    x, layers = self.applier.run(self.layers, x, block.run_block, *context)
    if layers is not self.layers:  # a layer made or replaced a Variable
      self.layers = layers
    return x

  def _run_groups(self, x: jax.Array, context: tuple) -> jax.Array:
    """x behind every group of layers; the groups are as their layers left them."""
    shared = self.config.shared_keys > 0
    carry: Any = self._handed(x, context[0]) if shared else x
    for i, group in enumerate(self.layers):
      carry, ran = block.run_group(group, carry, context, applier=self.applier)
      if ran is not group:
        self.layers[i] = ran
    return carry.x if shared else carry

  def _handed(self, x: jax.Array, positions: jax.Array) -> block.Handed:
    """A carry with room for the keys and values of the last layer of each type."""
    batch, length = x.shape[:2]
    if self.cache is not None:
      length = self.virtual + self.cache[1]
    places = positions if self.cache is None else jnp.arange(length)[None, :]
    places = jnp.broadcast_to(places, (batch, length))  # so that rows can be told apart
    c, banks = self.config, {}
    for name, local in (('full', False), ('local', True)):
      kinds = [c.kind(i) for i in range(c.layers) if c.is_local(i) == local]
      kind = kinds[0] if kinds else c.kind(0)
      zeros = jnp.zeros((batch, length, kind.kv_heads, kind.head_dim), x.dtype)
      banks[name] = (zeros, zeros, places)
    return block.Handed(x, **banks)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Logits [..., vocab] float32 of hidden states [..., embed]."""
    head = self.embed.attend if self.head is None else self.head
    logits = head(hidden).astype(jnp.float32)
    logits = _specs.constrain(logits, ('batch', 'length', 'vocab'), output=True)
    cap = self.config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)

  def gather_head(self) -> None:
    """Gathers the head's weight, in place, before a loop over parts of the hidden states."""
    _specs.gather(self.embed.table if self.head is None else self.head.kernel)

  @property
  def tied(self) -> bool:
    """Whether the embedding is also the head."""
    return self.head is None

  def untie(self) -> None:
    """Gives a tied head a kernel of its own, in place: the table, transposed."""
    if self.head is not None:
      return
    c = self.config
    head = nnx.eval_shape(lambda: _head(c, nnx.Rngs(0)))
    head.kernel.set_raw_value(self.embed.table[...].T)
    self.head = nnx.data(head)
    self.config = dataclasses.replace(c, tied=False)

  def init_cache(self, batch: int, length: int) -> Decoder:
    """A decoder on the same arrays with an empty KV cache for `batch` texts of `length` tokens.

    Its calls need `positions`, and write keys and values at them; a text must be filled from 0
    without gaps; padding behind it stands at position -1.

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
    model.applier = self.applier.for_batch(batch)
    empty = jnp.zeros((batch, 0, c.embed), self.embed.table.dtype)
    first = empty if self.inputs is None else model.inputs(empty)
    model.virtual = first.shape[1]
    virtual.check_length(c, model.virtual, length)
    for path, blocks in block.blocks_in(model.layers):
      lead, order = groups.layers_at(path, c).shape, _stack.order_at(model, path)
      lead = lead if order is None else (len(order), *lead[1:])
      blocks.mixer.init_cache(lead, batch, model.virtual + length)
    if _layer.reads_batch(model):
      none = jnp.full((batch, length), -1, jnp.int32)
      model.text = nnx.data(nnx.Cache(none, axes=('batch', 'length')))
    model.cache = (batch, length)
    if model.virtual:
      model._fill(first)
    return model

  @property
  def room(self) -> int:
    """The tokens of a text that fit behind the virtual tokens of its adapters."""
    inputs: Any = self.inputs
    if not getattr(inputs, 'adapters', ()):
      return self.config.max_length
    empty = jax.ShapeDtypeStruct((1, 0, self.config.embed), self.embed.table.dtype)
    return self.config.max_length - jax.eval_shape(inputs, empty).shape[1]

  def _fill(self, first: jax.Array) -> None:
    """Puts the keys and values of virtual tokens [batch, count, embed] into the empty caches.

    They stand before every text, and see nothing of it.
    """
    places = jnp.arange(self.virtual, dtype=jnp.int32)[None, :]
    batch = None
    if self.text is not None:
      nowhere = jnp.full(first.shape[:2], virtual.NOWHERE, jnp.int32)
      batch = virtual.Batch(self.text[...], nowhere)
    self._run_layers(first, (places, None, None, batch))

  @property
  def stacks(self) -> list[nnx.Module]:
    """The stacks of its layers, in order."""
    return list(self.layers) if isinstance(self.layers, nnx.List) else [self.layers]

  def lay_out(self, mesh: jax.sharding.Mesh | None = None, *, donate: bool = False) -> None:
    """Puts the arrays of its stacks in the order that its applier needs, in place.

    Args:
      mesh: default: the one in context.
      donate: see `Applier.lay_out`.
    """
    if not isinstance(self.layers, nnx.List):
      self.layers = self.applier.lay_out(self.layers, mesh, donate=donate)
      return
    for i, group in enumerate(self.layers):
      self.layers[i] = self.applier.lay_out(group, mesh, donate=donate)

  def hf_names(self) -> dict[str, str]:
    """Its modules, layer by layer, -> the names they have in a checkpoint of its family.

    Returns:
      {'layers.0.attn.q': 'model.layers.0.self_attn.q_proj', ..., 'norm': 'model.norm'}; a tied head
      has no name. Experts have names of their own where each has tensors of its own in a file.
    """
    held = {path[:-1] for path in _parts.variables(self)}
    theirs = _registry.families.get(self.config.family).adapter_modules
    nodes, names = dict(nnx.iter_graph(self)), {}
    for path in held:
      name = theirs.get(_parts.path_name(groups.plain_path(path)))
      if name is None:
        continue
      lead = groups.layers_at(path, self.config).shape if '{layer}' in name else ()
      if '{expert}' in name:
        lead = (*lead, nodes[path].shape[0])
      for index in np.ndindex(*lead):
        number, own = self._number(path, index), self.layer_name(path, index)
        expert = str(index[-1]) if index else ''
        names[own] = name.replace('{layer}', str(number)).replace('{expert}', expert)
    return names

  def layer_name(self, path: tuple, index: tuple[int, ...]) -> str:
    """The name of one layer of a stack, by its number in the model: 'layers.7.attn.q'.

    Args:
      path: of a layer, ('layers', 1, 'runs', 0, 'attn', 'q') or ('layers', 'attn', 'q').
      index: which of the stack, one number per stack axis; of experts one more, which the name has
        in front of its last word: 'layers.7.mlp.experts.3.up'.
    """
    if path[:1] != ('layers',):
      return _parts.path_name(path)
    experts = index[groups.layers_at(path, self.config).ndim :]
    inner = groups.plain_path(path)[1:]
    words = ('layers', self._number(path, index), *inner[:-1], *experts, *inner[-1:])
    return _parts.path_name(words)

  def _number(self, path: tuple, index: tuple[int, ...]) -> int | None:
    """Which layer of the model it is; None outside of the layers."""
    if path[:1] != ('layers',):
      return None
    numbers = groups.layers_at(path, self.config)
    return int(numbers[index[: numbers.ndim]])

  def _positions(
    self, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
  ) -> jax.Array:
    shape = getattr(tokens, 'shape', None)
    if shape is None or len(shape) != 2 or 0 in shape:
      given = f'are a {type(tokens).__name__}' if shape is None else f'have shape {shape}'
      raise ValueError(f'tokens {given}; expected an array [batch, length], neither of them 0.')
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
      raise ValueError(f'tokens are {tokens.dtype}; expected whole numbers.')
    batch, length = tokens.shape
    if segment_ids is not None and segment_ids.shape != tokens.shape:
      raise ValueError(f'segment_ids have shape {segment_ids.shape}; expected {tokens.shape}.')
    if self.cache is not None:
      _check_cached(self.cache, tokens, positions, segment_ids)
    if positions is not None and positions.shape not in ((batch, length), (1, length)):
      raise ValueError(f'positions have shape {positions.shape}; expected {tokens.shape}.')
    inputs.check(self.config, tokens, positions, cache=self.cache)
    return jnp.arange(length, dtype=jnp.int32)[None, :] if positions is None else positions


def _check_cached(
  cache: tuple[int, int],
  tokens: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
) -> None:
  if positions is None:
    raise ValueError('positions are needed with a cache: they say where tokens go.')
  if segment_ids is not None:
    raise ValueError('segment_ids cannot be used with a cache: a cache holds one text per row.')
  if tokens.shape[0] != cache[0] or tokens.shape[1] > cache[1]:
    raise ValueError(
      f'tokens have shape {tokens.shape}; the cache is for batch {cache[0]} and length {cache[1]}.'
    )


def _head(config: DecoderConfig, rngs: nnx.Rngs) -> Dense:
  ends = ({'embed': config.embed}, {'vocab': config.vocab})
  return Dense(*ends, dtype=jnp.dtype(config.dtype), rngs=rngs, role='head')


class TokenEmbeds(nnx.Module):
  """What every layer's `TokenEmbed` reads: an embedding of the token, and a view of the stream.

  Attributes:
    table: Embedding [vocab, layers * size].
    project: Dense embed -> layers * size.
    norm: RMSNorm over size.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    c, dtype = config, jnp.dtype(config.dtype)
    size = c.layers * c.per_layer_embed
    self.table = Embedding(c.per_layer_vocab, size, dtype=dtype, rngs=rngs)
    ends = ({'embed': c.embed}, {'token_embeds': size})
    self.project = Dense(*ends, dtype=dtype, rngs=rngs, role='mlp')
    self.norm = RMSNorm(
      c.per_layer_embed, eps=c.norm_eps, unit_offset=c.norm_unit_offset, dtype=dtype
    )
    self.config = config

  def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """tokens [batch, length], x [batch, length, embed] -> [batch, length, layers, size]."""
    c = self.config
    shape = (*tokens.shape, c.layers, c.per_layer_embed)
    own = self.table(tokens) * jnp.asarray(c.per_layer_embed**0.5, x.dtype)
    seen = self.project(x) * jnp.asarray(c.embed**-0.5, x.dtype)
    both = self.norm(seen.reshape(shape)) + own.reshape(shape)
    return both * jnp.asarray(2**-0.5, x.dtype)


def constants(config: DecoderConfig) -> dict[tuple, jax.Array]:
  """The constants of the layers that a config tells, by path, each stacked like its layers."""
  found = {}
  every = groups.groups(config)
  plain = len(every) == 1 and not every[0].nested
  for i, group in enumerate(every):
    for j, (kind, _) in enumerate(group.runs):
      path: tuple = ('layers',) if plain else ('layers', i)
      path = (*path, 'runs', j) if group.nested else path
      for inner, value in block.layer_constants(config, group.numbers(j), kind).items():
        found[*path, *inner] = value
  return found


def layer_constants(config: DecoderConfig) -> dict[str, jax.Array]:
  """The constants of attention, by name, each [layers, ...], where all layers are of one kind."""
  return {path[-1]: v for path, v in constants(config).items() if path[:2] == ('layers', 'attn')}

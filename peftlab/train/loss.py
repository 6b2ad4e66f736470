"""Cross entropy of the next token under a mask, in chunks, so that no huge logits ever exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _chunks, _parts

Batch = Mapping[str, jax.Array]

# Float32 logits that may exist at once on a device: 128 MiB.
MOST_LOGITS = 2**25


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """-log softmax(logits)[target]: logits [..., vocab], targets [...] int -> [...] float32.

  The target's logit is picked by a comparison, not by a gather: its gradient then fuses with the
  softmax's and no scatter into [..., vocab] is made.
  """
  logits = logits.astype(jnp.float32)
  words = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
  hit = words == targets[..., None]
  picked = jnp.sum(logits, axis=-1, where=hit)
  return jax.nn.logsumexp(logits, axis=-1) - picked


def count_tokens(batch: Batch) -> jax.Array:
  """How many tokens of a batch count in its loss, float32 []."""
  return jnp.sum(batch['loss_mask'].astype(bool), dtype=jnp.float32)


def summed_loss(
  parts: _parts.Parts, batch: Batch, *, most_logits: int = MOST_LOGITS
) -> tuple[jax.Array, Any]:
  """The sum of the losses of all tokens that count, and the model's state after the pass.

  A model with `hidden(tokens, ...)` and `logits(hidden)` has its logits made chunk by chunk along
  the length, and made again in the backward pass. Where it has `gather_head()` its head is gathered
  once by that. Any other model is called as a whole.

  Args:
    parts: of a model `model(tokens, positions=..., segment_ids=...) -> logits`.
    batch: tokens, targets [rows, length] int, loss_mask [rows, length], and where the model is to
      get them positions, segment_ids [rows, length] int.
    most_logits: logits that may exist at once on a device of the mesh in context.

  Returns:
    [] float32, and a tree like `parts.state`.
  """
  model: Any = _parts.merge(parts)
  inputs = {name: batch[name] for name in ('positions', 'segment_ids') if name in batch}
  if not hasattr(model, 'hidden'):
    logits = model(batch['tokens'], **inputs)
    return _masked_sum(logits, batch['targets'], batch['loss_mask']), _state(model, parts)
  hidden = model.hidden(batch['tokens'], **inputs)
  parts = parts.replace(state=_state(model, parts))
  return _chunked(parts, hidden, batch['targets'], batch['loss_mask'], most_logits)


def _masked_sum(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
  return jnp.sum(token_losses(logits, targets), where=mask.astype(bool))


def _state(model: nnx.Module, before: _parts.Parts) -> Any:
  """The state of `model`, without what the pass sowed."""
  after = _parts.flat(_parts.split(model).state)
  return _parts.nest({path: after[path] for path in _parts.flat(before.state)})


def _chunked(
  parts: _parts.Parts, hidden: jax.Array, targets: jax.Array, mask: jax.Array, most_logits: int
) -> tuple[jax.Array, Any]:
  def chunk(state: Any, xs: tuple) -> tuple[Any, jax.Array]:
    model: Any = _parts.merge(parts.replace(state=state))
    total = _masked_sum(model.logits(xs[0]), xs[1], xs[2])
    return _state(model, parts), total

  def column(parts: _parts.Parts, hidden: jax.Array) -> jax.Array:
    model: Any = _parts.merge(parts)
    return model.logits(hidden)

  one = jax.eval_shape(column, parts, hidden[:, :1])
  column_logits = one.size // _chunks.pieces(one.shape, ('batch', 'length', 'vocab'))
  chunks = _chunks.count(hidden.shape[1], column_logits, most_logits)
  if chunks == 1:
    state, total = chunk(parts.state, (hidden, targets, mask))
    return total, state
  parts = _with_gathered_head(parts)
  xs = tuple(_chunks.cut(array, chunks) for array in (hidden, targets, mask))
  state, totals = jax.lax.scan(jax.checkpoint(chunk, prevent_cse=False), parts.state, xs)
  return jnp.sum(totals), state


def _with_gathered_head(parts: _parts.Parts) -> _parts.Parts:
  """The parts with the head as every chunk reads it, where the model has a way to gather it."""
  model: Any = _parts.merge(parts)
  if hasattr(model, 'gather_head'):
    model.gather_head()
  return parts.replace(base=_parts.split(model).base)

"""What an adapter may ask about the batch: which tokens its rows are, and what is around them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
import contextlib
import contextvars
import dataclasses

import jax
import jax.numpy as jnp

NOWHERE = -1  # the place of a row that is no token of a text: a virtual token, padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """The tokens of a batch, offered to the adapters of every layer it runs through.

  Attributes:
    text: [batch, text] int, every token so far; with a cache those before this call too, and -1
      where there is none yet.
    places: [batch, length] int, where in the text each row that the layers see stands, or NOWHERE.
    segments: [batch, text] int, or None: texts packed into one row, each a run of equal numbers.
  """

  text: jax.Array
  places: jax.Array
  segments: jax.Array | None = None

  def after(self, sequence: Sequence[int]) -> jax.Array:
    """Which rows stand at or behind the start of the last occurrence of some tokens in their text.

    Args:
      sequence: the tokens, one at least.

    Returns:
      bool [batch * length], in the order in which a linear layer sees the rows; False where the
      sequence does not occur in the text, and for what is no token.
    """
    last = self._last(tuple(sequence))
    at = jnp.maximum(self.places, 0)
    last = jnp.take_along_axis(last, jnp.broadcast_to(at, self.places.shape), axis=1)
    return ((self.places >= last) & (last >= 0) & (self.places >= 0)).reshape(-1)

  def _last(self, sequence: tuple[int, ...]) -> jax.Array:
    """[batch, text]: for each place the last start of the sequence in the same text; -1: none."""
    size, count = self.text.shape[1], len(sequence)
    if count > size:
      return jnp.full_like(self.text, -1)
    starts = size - count + 1
    found = jnp.ones((self.text.shape[0], starts), bool)
    for i, token in enumerate(sequence):
      found &= self.text[:, i : i + starts] == token
    if self.segments is not None:
      found &= self.segments[:, :starts] == self.segments[:, count - 1 :]
    index = jnp.arange(size, dtype=jnp.int32)[None, :]
    marked = jnp.where(found, index[:, :starts], -1)
    marked = jnp.pad(marked, ((0, 0), (0, count - 1)), constant_values=-1)
    if self.segments is None:
      return jnp.broadcast_to(jnp.max(marked, axis=1, keepdims=True), self.text.shape)
    # The last one up to the end of the own segment, where it is of that segment.
    ends = self.segments[:, 1:] != self.segments[:, :-1]
    ends = jnp.pad(ends, ((0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(ends, index, size), axis=1, reverse=True)
    last = jnp.take_along_axis(jax.lax.cummax(marked, axis=1), end, axis=1)
    of = jnp.take_along_axis(self.segments, jnp.maximum(last, 0), axis=1)
    return jnp.where(of == self.segments, last, -1)


class Everywhere:
  """Stands for a batch where there are no texts: every row counts as behind any tokens."""

  def after(self, sequence: Sequence[int]) -> jax.Array:
    """True, [1]."""
    del sequence
    return jnp.ones((1,), bool)


EVERYWHERE = Everywhere()
_offered: contextvars.ContextVar[Batch | Everywhere | None] = contextvars.ContextVar(
  'batch', default=None
)


@contextlib.contextmanager
def offering(batch: Batch | Everywhere | None) -> Generator[None]:
  """Within the block the layers that are called offer this batch to their adapters; None: none.

  An applier traces each layer on its own: the body of a layer opens the block, with a batch that it
  was given as part of its context.
  """
  token = _offered.set(batch)
  try:
    yield
  finally:
    _offered.reset(token)


def offered(rows: int) -> Batch | Everywhere:
  """The batch that is offered to a layer called with so many rows.

  Raises:
    ValueError: none is offered, or it has another number of rows.
  """
  batch = _offered.get()
  if batch is None:
    raise ValueError(
      'An adapter asks for the tokens of the batch, which this model does not offer to its layers '
      '(peftlab.offering).'
    )
  if isinstance(batch, Batch) and batch.places.size != rows:
    raise ValueError(
      f'An adapter asks for the tokens of the batch, of shape {batch.places.shape}, in a layer '
      f'that is called with {rows} rows.'
    )
  return batch

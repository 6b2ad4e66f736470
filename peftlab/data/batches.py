"""A resumable iterator over rows: any batch follows from the seed and how many came before it."""

from collections.abc import Iterator
import functools
from typing import Any

import numpy as np

from peftlab.data.rows import Batch, Rows


class Batches(Iterator[Batch]):
  """Batches without end; every epoch has all rows once, in an order drawn from (seed, epoch).

  Batches are `size` consecutive rows of the epochs behind one another: none is short and no row is
  left out. The position is one number, so `restore(state())` in another process continues bitwise.
  """

  def __init__(self, rows: Rows, *, size: int, seed: int = 0, shuffle: bool = True):
    """Starts at the first batch.

    Args:
      rows: what to iterate over.
      size: rows of a batch, 1 or more.
      seed: of the order, 0 or more.
      shuffle: whether there is an order other than that of the corpus.
    """
    if type(size) is not int or type(seed) is not int or size < 1 or seed < 0:
      raise ValueError(f'Batches of size {size} with seed {seed}; expected 1 or more, 0 or more.')
    self.rows, self.size, self.seed, self.shuffle = rows, size, seed, shuffle
    self.step = 0

  def __next__(self) -> Batch:
    batch = self.rows.batch(self.indices(self.step))
    self.step += 1
    return batch

  def indices(self, step: int) -> np.ndarray:
    """The rows of batch number `step`, [size]."""
    places = np.arange(step * self.size, (step + 1) * self.size)
    epochs, within = np.divmod(places, len(self.rows))
    return np.array([self._order(int(e))[i] for e, i in zip(epochs, within, strict=True)])

  @property
  def epoch(self) -> float:
    """How many times all rows have been seen."""
    return self.step * self.size / len(self.rows)

  def state(self) -> dict[str, Any]:
    """The position, for JSON: the step, and what it is a position in."""
    return {'step': self.step, **self._setting()}

  def restore(self, state: dict[str, Any]) -> None:
    """Goes to a position that `state()` gave.

    Raises:
      ValueError: it is a position in other data, by name; this iterator is then unchanged.
    """
    setting = self._setting()
    if set(state) != {'step', *setting} or type(state['step']) is not int or state['step'] < 0:
      raise ValueError(
        f'A data position with {sorted(state)} cannot be restored; expected step and '
        f'{", ".join(setting)}.'
      )
    for name, here in setting.items():
      if state[name] != here:
        reason = ' (other text, or another tokenizer, under the same names)'
        raise ValueError(
          f'The data position was saved with {name} {state[name]!r}; this run has {here!r}'
          f'{reason if name == "fingerprint" else ""}.'
        )
    self.step = state['step']

  def _setting(self) -> dict[str, Any]:
    """What the order and the content of the batches depend on; the telling names come first."""
    return {
      **self.rows.source,
      'length': self.rows.length,
      'size': self.size,
      'seed': self.seed,
      'shuffle': self.shuffle,
      'fingerprint': self.rows.fingerprint,
    }

  def _order(self, epoch: int) -> np.ndarray:
    return _order(len(self.rows), self.seed if self.shuffle else None, epoch)


@functools.lru_cache(maxsize=8)
def _order(count: int, seed: int | None, epoch: int) -> np.ndarray:
  """The rows of an epoch. RandomState's stream is frozen: the same in every version of numpy."""
  if seed is None:
    return np.arange(count)
  state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch))))
  return state.permutation(count)


def held_out_batches(rows: Rows, *, size: int, count: int | None = None) -> list[Batch]:
  """A fixed list of batches for evaluation, each row once; empty rows fill up the last batch.

  Args:
    rows: of the held-out part.
    size: rows of a batch.
    count: of rows, whatever the size of a batch; fewer than there are are taken at even distances.
      None: all rows.
  """
  if size < 1 or (count is not None and count < 1):
    raise ValueError(f'{count} held-out rows in batches of {size}; expected 1 or more of both.')
  chosen = np.arange(len(rows))
  if count is not None and count < len(rows):
    chosen = np.linspace(0, len(rows) - 1, count).astype(np.int64)
  chosen = np.concatenate([chosen, np.full(-len(chosen) % size, -1)])
  return [rows.batch(part) for part in chosen.reshape(-1, size)]

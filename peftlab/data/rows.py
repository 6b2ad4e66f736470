"""Rows of fixed length over one stream of ids, built into batches when they are asked for."""

from collections.abc import Sequence
import dataclasses
import functools
import hashlib

import numpy as np

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
  """Rows of `length` tokens, each of one or more pieces of documents.

  Attributes:
    length: tokens of a row.
    pad_id: what stands where there is no document.
    stream: int32 [n], the ids of all documents, one behind the other.
    predicted: bool [n], the ids that count in the loss as targets.
    pieces: int64 [pieces, 4], sorted by row: row, start and stop in the stream, and 1 where the
      document goes on at `stop`, so that the last token has a target.
    source: what they were made from, by name ('corpus', 'tokenizer', ...), for `fingerprint`.
  """

  length: int
  pad_id: int
  stream: np.ndarray
  predicted: np.ndarray
  pieces: np.ndarray
  source: dict[str, str]

  def __len__(self) -> int:
    return int(self.pieces[-1, 0]) + 1

  @functools.cached_property
  def fingerprint(self) -> str:
    """16 hex digits of the SHA-256 of everything the batches depend on."""
    digest = hashlib.sha256(f'{self.length} {self.pad_id}'.encode())
    for array in (self.stream, self.predicted, self.pieces):
      digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]

  def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
    """The given rows; -1 is an empty one.

    Returns:
      tokens, targets, positions, segment_ids int32 and loss_mask float32, all [batch, length].
      targets[i] is the token after tokens[i] in its document. A piece of a document is a segment
      of its own (1, 2, ... within the row, 0 is padding) with positions from 0.
    """
    shape = (len(rows), self.length)
    result: Batch = {
      'tokens': np.full(shape, self.pad_id, np.int32),
      'targets': np.full(shape, self.pad_id, np.int32),
      'loss_mask': np.zeros(shape, np.float32),
      'positions': np.zeros(shape, np.int32),
      'segment_ids': np.zeros(shape, np.int32),
    }
    for number, row in enumerate(rows):
      self._fill({name: array[number] for name, array in result.items()}, int(row))
    return result

  def _fill(self, out: Batch, row: int) -> None:
    first, last = np.searchsorted(self.pieces[:, 0], (row, row + 1))
    at = 0
    for segment, (start, stop, more) in enumerate(self.pieces[first:last, 1:].tolist(), start=1):
      size, known = stop - start, stop - start - 1 + more
      out['tokens'][at : at + size] = self.stream[start:stop]
      out['targets'][at : at + known] = self.stream[start + 1 : start + 1 + known]
      out['loss_mask'][at : at + known] = self.predicted[start + 1 : start + 1 + known]
      out['positions'][at : at + size] = np.arange(size)
      out['segment_ids'][at : at + size] = segment
      at += size

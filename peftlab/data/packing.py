"""A corpus as rows: documents packed one behind the other, and a report of what did not fit."""

import collections
import dataclasses

import numpy as np

from peftlab.data.corpora import Corpus
from peftlab.data.rows import Rows
from peftlab.data.sequences import TokenSequence, choose_template, to_sequence
from peftlab.data.tokenizers import Tokenizer

_RECENT = 32  # rows that sft packing looks back at for room


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingReport:
  """What became of each document. `str()` says it in a line.

  Attributes:
    corpus: its name.
    documents: how many the corpus has.
    rows: how many rows there are.
    length: tokens of a row.
    tokens: how many tokens of the rows are not padding.
    predicted: how many targets count in the loss.
    used: how many documents are in the rows.
    truncated: documents whose end was cut off (sft; pretrain goes on in the next row).
    cut_away: left out, because their whole completion was cut off.
    without_completion: left out, because nobody answers in them.
    unread: not read, or not to the end, because `max_rows` was reached.
    lost_characters: characters that the tokenizer has no tokens for.
  """

  corpus: str
  documents: int
  rows: int
  length: int
  tokens: int
  predicted: int
  used: int = 0
  truncated: int = 0
  cut_away: int = 0
  without_completion: int = 0
  unread: int = 0
  lost_characters: int = 0

  def __str__(self):
    share = self.tokens / (self.rows * self.length)
    text = (
      f'{self.corpus}: {self.used:,} of {self.documents:,} documents in {self.rows:,} rows of '
      f'{self.length} ({share:.1%} filled), {self.predicted:,} tokens to predict'
    )
    notes = {
      'truncated': self.truncated,
      'left out with the whole completion cut off': self.cut_away,
      'left out without a completion': self.without_completion,
      'not read': self.unread,
      'characters without a token': self.lost_characters,
    }
    return '; '.join([text, *(f'{count:,} {note}' for note, count in notes.items() if count)]) + '.'


@dataclasses.dataclass(kw_only=True)
class _Shelf:
  """Rows being filled: `used` tokens of each, `pieces` as in Rows."""

  length: int
  max_rows: int | None
  used: list[int] = dataclasses.field(default_factory=list)
  pieces: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)

  def add_cut(self, offset: int, size: int) -> bool:
    """Places `size` ids, going on in new rows; False where `max_rows` ends it."""
    start = 0
    while size - start >= 2:  # a last id alone has no target
      if (not self.used or self.used[-1] == self.length) and not self._open():
        return False
      stop = min(start + self.length - self.used[-1], size)
      self._place(len(self.used) - 1, offset + start, offset + stop, stop < size)
      start = stop
    return True

  def add_whole(self, offset: int, size: int, *, packed: bool) -> bool:
    """Places the first `length` ids in one row; False where `max_rows` ends it."""
    kept = min(size, self.length)
    recent = range(max(0, len(self.used) - _RECENT) if packed else len(self.used), len(self.used))
    row = next((row for row in recent if self.used[row] + kept <= self.length), len(self.used))
    if row == len(self.used) and not self._open():
      return False
    self._place(row, offset, offset + kept, kept < size)
    return True

  def _open(self) -> bool:
    if len(self.used) == self.max_rows:
      return False
    self.used.append(0)
    return True

  def _place(self, row: int, start: int, stop: int, more: bool) -> None:
    self.pieces.append((row, start, stop, int(more)))
    self.used[row] += stop - start


def pack(
  corpus: Corpus,
  tokenizer: Tokenizer,
  *,
  objective: str,
  length: int,
  template: str = 'auto',
  packed: bool = True,
  max_rows: int | None = None,
) -> tuple[Rows, PackingReport]:
  """The rows of a corpus, and what became of its documents.

  pretrain: documents one behind the other, eos behind each; what does not fit goes on in the next
  row, so that every id but each document's first is predicted exactly once. sft: only completions
  are predicted, a document stays in one row, and what is longer than `length` is cut at its end.

  Args:
    corpus: the documents.
    tokenizer: makes ids of them.
    objective: 'pretrain' or 'sft'.
    length: tokens of a row, 2 or more.
    template: 'chat', 'plain', or 'auto' (plain for pretrain, chat for sft where there is one).
    packed: for sft, whether a row takes several documents; pretrain always does.
    max_rows: stop there; the documents behind are not read.

  Raises:
    ValueError: an unknown word, a length below 2, a document the objective cannot use, no rows.
  """
  template = choose_template(tokenizer, objective=objective, template=template)
  if length < 2:
    raise ValueError(f'A row length of {length} has nothing to predict; expected 2 or more.')
  shelf, counts = _Shelf(length=length, max_rows=max_rows), collections.Counter()
  kept: list[TokenSequence] = []
  offset = 0
  for number, example in enumerate(corpus.examples):
    sequence = to_sequence(corpus, example, tokenizer, objective=objective, template=template)
    if objective == 'sft':
      sequence = _cut_to_completion(sequence, length, counts)
    if sequence is None:
      continue
    kept.append(sequence)
    size = len(sequence.ids)
    whole = objective == 'sft'
    placed = shelf.add_whole(offset, size, packed=packed) if whole else shelf.add_cut(offset, size)
    if not placed:
      counts['unread'] = len(corpus.examples) - number
      break
    offset += size
    if tokenizer.lost:
      counts['lost_characters'] += len(tokenizer.lost.findall(corpus.plain_text(example)))
    counts['used'] += 1
  source = {'corpus': corpus.name, 'tokenizer': tokenizer.name}
  source |= {'objective': objective, 'template': template}
  return _finish(
    shelf, kept, counts, source, pad_id=tokenizer.pad_id, documents=len(corpus.examples)
  )


def _cut_to_completion(
  sequence: TokenSequence, length: int, counts: collections.Counter[str]
) -> TokenSequence | None:
  """At most `length` ids and the target of the last, ending at a completion; None without one."""
  kept = sequence.predicted[: length + 1]
  if not kept.any():
    counts['cut_away' if sequence.predicted.any() else 'without_completion'] += 1
    return None
  counts['truncated'] += int(sequence.predicted[length + 1 :].any())
  end = int(np.flatnonzero(kept)[-1]) + 1
  return TokenSequence(ids=sequence.ids[:end], predicted=kept[:end])


def _finish(
  shelf: _Shelf,
  kept: list[TokenSequence],
  counts: collections.Counter[str],
  source: dict[str, str],
  *,
  pad_id: int,
  documents: int,
) -> tuple[Rows, PackingReport]:
  if not shelf.pieces:
    reasons = ', '.join(f'{count:,} {name.replace("_", " ")}' for name, count in counts.items())
    raise ValueError(
      f"Corpus '{source['corpus']}' of {documents:,} documents gives no rows of {shelf.length} for "
      f'{source["objective"]}: {reasons or "every document is too short"}.'
    )
  pieces = np.array(sorted(shelf.pieces), np.int64)
  rows = Rows(
    length=shelf.length,
    pad_id=pad_id,
    stream=np.concatenate([sequence.ids for sequence in kept]),
    predicted=np.concatenate([sequence.predicted for sequence in kept]),
    pieces=pieces,
    source=source,
  )
  before = np.concatenate([[0], np.cumsum(rows.predicted)])  # predicted ids before each place
  _, start, stop, more = pieces.T
  report = PackingReport(
    corpus=source['corpus'],
    documents=documents,
    rows=len(rows),
    length=shelf.length,
    tokens=int((stop - start).sum()),
    predicted=int((before[stop + more] - before[start + 1]).sum()),
    **counts,
  )
  return rows, report

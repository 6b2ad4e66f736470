"""The record of a run: metrics.jsonl, one object a line, and the same numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
import json
import math
import os
import pathlib
from typing import Any

from peftlab.formats import files

FILE = 'metrics.jsonl'
Record = dict[str, Any]


class MetricsLog:
  """Appends records to DIR/metrics.jsonl, and their numbers to TensorBoard files in DIR.

  A record has a `kind` (train, eval, samples, ...) and a `step`. Every line is on disk when `write`
  returns.

  Raises:
    ValueError: the file has a line that is not a record, see `read_metrics`.
  """

  def __init__(self, folder: str | os.PathLike[str], *, tensorboard: bool = True):
    self.path = pathlib.Path(folder) / FILE
    self.path.parent.mkdir(parents=True, exist_ok=True)
    read_metrics(folder)  # a damaged record is refused before anything is written
    if self.path.exists():
      content = self.path.read_bytes()
      os.truncate(self.path, content.rfind(b'\n') + 1)  # a line that a kill has torn
    self._file = self.path.open('a', encoding='utf-8')
    self._board = _board(self.path.parent) if tensorboard else None

  def write(self, kind: str, step: int, **values: Any) -> None:
    """Appends one record; a number that is not finite is written as null."""
    record = {'kind': kind, 'step': step} | {k: _plain(v) for k, v in values.items()}
    self._file.write(json.dumps(record, allow_nan=False) + '\n')
    self._file.flush()
    if self._board is not None:
      for name, value in values.items():
        if isinstance(value, int | float):
          self._board.add_scalar(f'{kind}/{name}', value, step)

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    if self._board is not None:
      self._board.close()


def _board(folder: pathlib.Path) -> Any:
  import tensorboardX

  return tensorboardX.SummaryWriter(logdir=str(folder), write_to_disk=True)


def _plain(value: Any) -> Any:
  return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: str | os.PathLike[str]) -> list[Record]:
  """The records of a run, by step; of one kind and step the last one written counts.

  A last line that was torn by a kill is left out.

  Raises:
    ValueError: any other line that is not a record, by file and line.
  """
  path = pathlib.Path(folder) / FILE
  if not path.exists():
    return []
  *lines, torn = path.read_bytes().split(b'\n')
  del torn
  found: dict[tuple[str, int], Record] = {}
  for number, line in enumerate(lines, start=1):
    subject = f"Line {number} of '{path}'"
    record = files.parse_json(line, subject=subject)
    if not isinstance(record.get('step'), int) or not isinstance(record.get('kind'), str):
      raise ValueError(f'{subject} is not a record with kind and step: {record!r:.80}.')
    found[record['kind'], record['step']] = record
  return sorted(found.values(), key=lambda record: record['step'])


def last_value(records: Iterable[Record], kind: str, name: str) -> Any:
  """The value of a name in the last record of a kind, None where there is none."""
  values = [r[name] for r in records if r['kind'] == kind and name in r]
  return values[-1] if values else None

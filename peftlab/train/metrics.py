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


class Unwritten:
  """A record that another process writes."""

  def write(self, kind: str, step: int, **values: Any) -> None:
    """Nothing."""
    del kind, step, values

  def close(self) -> None:
    """Nothing."""


class MetricsLog:
  """Appends records to DIR/metrics.jsonl, and their numbers to TensorBoard files in DIR.

  A record has a `kind` (train, eval, samples, ...) and a `step`. Every line is on disk when `write`
  returns.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, step: int | None = None, tensorboard: bool = True
  ):
    """Opens the files; a last line that a kill has torn is cut off.

    Args:
      folder: is made where there is none.
      step: from which the run continues: records of later ones, which are made again, are cut off.
      tensorboard: whether TensorBoard files are written too.

    Raises:
      ValueError: the file has a line that is not a record, see `read_metrics`; nothing is changed.
    """
    self.path = pathlib.Path(folder) / FILE
    self.path.parent.mkdir(parents=True, exist_ok=True)
    earlier = self.path.exists()
    _cut(self.path, step)
    self._file = self.path.open('a', encoding='utf-8')
    self._board = _board(self.path.parent, step if earlier else None) if tensorboard else None

  def write(self, kind: str, step: int, **values: Any) -> None:
    """Appends one record; a number that is not finite is written as null."""
    record = {'kind': kind, 'step': step} | {k: _plain(v) for k, v in values.items()}
    self._file.write(json.dumps(record, allow_nan=False) + '\n')
    self._file.flush()
    if self._board is not None:
      for name, value in values.items():
        if isinstance(value, int | float) and math.isfinite(value):
          self._board.add_scalar(f'{kind}/{name}', value, step)

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    if self._board is not None:
      self._board.close()


def _cut(path: pathlib.Path, step: int | None) -> None:
  """Leaves out a torn last line and, atomically, the records of steps above `step`."""
  kept = [line for line, record in _lines(path) if step is None or record['step'] <= step]
  content = b''.join(line + b'\n' for line in kept)
  if path.exists() and path.read_bytes() != content:
    files.replace_file(path, lambda file: file.write(content))


def _board(folder: pathlib.Path, step: int | None) -> Any:
  """The TensorBoard writer; TensorBoard forgets what earlier files say of steps above `step`."""
  import tensorboardX

  purge = None if step is None else step + 1
  return tensorboardX.SummaryWriter(logdir=str(folder), purge_step=purge, write_to_disk=True)


def _plain(value: Any) -> Any:
  return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: str | os.PathLike[str]) -> list[Record]:
  """The records of a run, by step; of one kind and step the last one written counts.

  A last line that was torn by a kill is left out.

  Raises:
    ValueError: any other line that is not a record, by file and line.
  """
  found = {(r['kind'], r['step']): r for _, r in _lines(pathlib.Path(folder) / FILE)}
  return sorted(found.values(), key=lambda record: record['step'])


def _lines(path: pathlib.Path) -> list[tuple[bytes, Record]]:
  """The whole lines of a file, if there is one, and the records that they are."""
  if not path.exists():
    return []
  *lines, torn = path.read_bytes().split(b'\n')
  del torn
  found = []
  for number, line in enumerate(lines, start=1):
    subject = f"Line {number} of '{path}'"
    record = files.parse_json(line, subject=subject)
    if not isinstance(record.get('step'), int) or not isinstance(record.get('kind'), str):
      raise ValueError(f'{subject} is not a record with kind and step: {record!r:.80}.')
    found.append((line, record))
  return found


def last_value(records: Iterable[Record], kind: str, name: str) -> Any:
  """The value of a name in the last record of a kind, None where there is none."""
  values = [r[name] for r in records if r['kind'] == kind and name in r]
  return values[-1] if values else None

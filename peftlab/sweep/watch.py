"""One line per running trial: its step, its loss, the time it still takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import json
import pathlib
from typing import Any

from peftlab.sweep import rows
from peftlab.train import metrics
from peftlab.train.progress import duration
from peftlab.train.summary import show

# More than a line of metrics takes, so that the last whole line is in it.
_TAIL = 8192


class Watch:
  """Shows what runs; nothing is said of a trial that has not moved."""

  def __init__(self, labels: Mapping[str, str], *, say: Callable[[str], None]):
    self._labels, self._say = labels, say
    self._last: dict[str, int] = {}

  def show(self, folders: Iterable[pathlib.Path]) -> int:
    """One line per trial that has done a step since the last call; how many that were."""
    lines = 0
    for folder in folders:
      record = last_step(folder)
      if record is None or self._last.get(folder.name) == record['step']:
        continue
      self._last[folder.name] = record['step']
      lines += 1
      self._say(f'{folder.name} {self._labels.get(folder.name, "")}: {_progress(folder, record)}')
    return lines


def last_step(folder: pathlib.Path) -> dict[str, Any] | None:
  """The last whole record of an update in a trial's metrics, read from the end of the file."""
  path = folder / metrics.FILE
  if not path.exists():
    return None
  with path.open('rb') as file:
    file.seek(max(0, path.stat().st_size - _TAIL))
    lines = file.read().split(b'\n')[:-1]
  for line in reversed(lines):
    if line.startswith(b'{"kind": "train"'):
      return json.loads(line)
  return None


def _progress(folder: pathlib.Path, record: Mapping[str, Any]) -> str:
  config = folder / 'config.json'
  if not config.exists():
    return f'step {record["step"]}, loss {show(record["loss"], 3)}'
  steps = json.loads(config.read_text(encoding='utf-8'))['train']['steps']
  each = record['seconds'] / max(record['step'], 1)
  left = duration(each * (steps - record['step']))
  return f'step {record["step"]}/{steps}, loss {show(record["loss"], 3)}, {left} left'


def result(row: rows.Row) -> str:
  """'ok, held-out loss 2.4012 -> 1.8120 in 40 steps'."""
  if row['status'] == 'failed':
    return f'failed: {row.get("error", "")[:200]}'
  before, after = show(row.get('held_out_before')), show(row.get('held_out_after'))
  return f'{row["status"]}, held-out loss {before} -> {after} in {row["steps"]} steps'

"""The row of a trial, ROOT/ID/row.json: written once, whole, by the trial; and the trial's lock."""

from __future__ import annotations

from collections.abc import Generator, Iterable
import contextlib
import fcntl
import os
import pathlib
from typing import Any

from peftlab.formats import files

FILE = 'row.json'
LOCK = '.trial.lock'
VERSION = 1
# What a row can say, and what a trial without one can be.
ENDED = ('ok', 'diverged', 'failed')
STATUSES = (*ENDED, 'running', 'missing')

Row = dict[str, Any]
Path = str | os.PathLike[str]


def read(folder: Path) -> Row | None:
  """The row in a trial's folder; None where the trial has not ended.

  Raises:
    ValueError: the file is not a row.
  """
  path = pathlib.Path(folder) / FILE
  if not path.exists():
    return None
  row = files.read_json(path)
  if row.get('status') not in ENDED:
    raise ValueError(f"'{path}' is not a row: its status is {row.get('status')!r}.")
  return row


def write(folder: Path, row: Row) -> None:
  """Writes the row, atomically.

  Raises:
    ValueError: a status that a row cannot have, or a number that is not finite.
  """
  if row.get('status') not in ENDED:
    raise ValueError(f'The status of a row is {row.get("status")!r}; expected {", ".join(ENDED)}.')
  files.write_json(pathlib.Path(folder) / FILE, {'version': VERSION, **row})


def set_aside(folder: Path) -> None:
  """Renames the row, so that the trial runs again; the old one stays beside it."""
  path = pathlib.Path(folder) / FILE
  number = 1 + len(list(path.parent.glob('row.*.json')))
  path.rename(path.with_name(f'row.{number}.json'))


@contextlib.contextmanager
def locked(folder: Path) -> Generator[pathlib.Path]:
  """Within the block no other process runs the trial of a folder; waits for the one that does.

  A trial whose launcher was killed goes on alone. Who starts it again waits here for its end, and
  then finds its row. The file names the process that has it.
  """
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  with (path / LOCK).open('a') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.truncate(0)
    lock.write(f'{os.getpid()}\n')
    lock.flush()
    yield path


def is_locked(folder: Path) -> bool:
  """Whether a process runs the trial of a folder now."""
  path = pathlib.Path(folder) / LOCK
  if not path.exists():
    return False
  with path.open('r') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
  return False


def status(folder: Path) -> str:
  """One of `STATUSES`."""
  row = read(folder)
  if row is not None:
    return row['status']
  return 'running' if is_locked(folder) else 'missing'


def count(statuses: Iterable[str]) -> str:
  """'12 trials: 10 ok, 1 diverged, 1 missing'."""
  found = list(statuses)
  parts = [f'{found.count(s)} {s}' for s in STATUSES if s in found]
  return f'{len(found)} trials: {", ".join(parts) or "none"}'

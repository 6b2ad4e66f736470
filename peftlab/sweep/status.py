"""What the trials of a root came to, as text."""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib

from peftlab.sweep import ledger, rows, space
from peftlab.train.progress import table as text_table
from peftlab.train.summary import show


def table(root: str | os.PathLike[str], ids: Sequence[str] | None = None) -> str:
  """One line per trial, and the count of each status; missing and failed ones are there too.

  Args:
    root: of the sweep.
    ids: of the trials to show; None: all.
  """
  known = ledger.read(root)
  head = ('trial', 'status', 'steps', 'held out', 'after', 'setting')
  lines: list[tuple[str, ...]] = [head]
  found = []
  for name in known if ids is None else ids:
    folder = pathlib.Path(root) / name
    row = rows.read(folder) or {}
    found.append(row.get('status') or rows.status(folder))
    numbers = [show(row.get(k)) for k in ('steps', 'held_out_before', 'held_out_after')]
    lines.append((name, found[-1], *numbers, space.show(known[name]['setting'])))
  return f'{text_table(lines)}\n{rows.count(found)}'


def complete(root: str | os.PathLike[str]) -> bool:
  """Whether every trial of a root has ended, and none failed."""
  found = {rows.status(pathlib.Path(root) / name) for name in ledger.read(root)}
  return found <= {'ok', 'diverged'}

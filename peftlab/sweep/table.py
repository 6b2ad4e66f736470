"""The trials of a root as a table: a line per setting, over its seeds, compared with the best."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np

from peftlab.sweep import items, ledger, rows, space, stats

ADAPTER_TYPE = 'type'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One trial.

  Attributes:
    id: of it.
    setting: what the sweep set.
    config: resolved, as JSON.
    command: what makes it again.
    status: see `rows.STATUSES`.
    row: its numbers; empty where it has no row.
  """

  id: str
  setting: space.Setting
  config: dict[str, Any]
  command: list[str]
  status: str
  row: rows.Row

  @property
  def loss(self) -> float | None:
    """The held-out loss at the end, None unless the trial is ok."""
    return self.row.get('held_out_after') if self.status == 'ok' else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """All seeds of one setting.

  Attributes:
    setting: without the seed.
    entries: its trials.
    loss: mean held-out loss of those that are ok, None where none is.
    versus: the setting against the best one on the same items, None for the best itself or where
      there are no common items.
    p: of that test, corrected for the number of settings that are compared.
  """

  setting: space.Setting
  entries: tuple[Entry, ...]
  loss: stats.Interval | None
  versus: stats.Paired | None = None
  p: float | None = None

  @property
  def label(self) -> str:
    """'rank=8 learning_rate=0.001'."""
    return space.show(self.setting) or 'the experiment'

  @property
  def complete(self) -> bool:
    """Whether every trial is ok: a mean over the seeds that did not diverge flatters."""
    return all(entry.status == 'ok' for entry in self.entries)

  def mean(self, *names: str) -> float | None:
    """The mean of a number of the rows, by its keys, None where none has it."""
    found = [value for e in self.entries if (value := _number(e.row, names)) is not None]
    return float(np.mean(found)) if found else None


def _number(row: Any, names: Sequence[str]) -> float | None:
  for name in names:
    row = row.get(name) if isinstance(row, dict) else None
  return row


def read(root: str | os.PathLike[str]) -> list[Entry]:
  """Every trial that a root was asked for, whether it has a row or not.

  Raises:
    ValueError: there is no sweep, or a row is damaged.
  """
  found = []
  for name, known in ledger.read(root).items():
    folder = pathlib.Path(root) / name
    row = rows.read(folder)
    found.append(
      Entry(
        id=name,
        setting=known['setting'],
        config=known['config'],
        command=known['command'],
        status=row['status'] if row else rows.status(folder),
        row=row or {},
      )
    )
  return found


def group(entries: Sequence[Entry], root: str | os.PathLike[str]) -> list[Group]:
  """The settings of some trials, each compared with the best, the best first.

  The best has the lowest mean loss among the settings whose trials are all ok.
  """
  together: dict[str, list[Entry]] = {}
  for entry in entries:
    setting = {k: v for k, v in entry.setting.items() if k != 'seed'}
    together.setdefault(json.dumps(setting, sort_keys=True), []).append(entry)
  groups = [_group(found) for found in together.values()]
  groups.sort(key=lambda g: (g.loss is None, not g.complete, g.loss.mean if g.loss else 0.0))
  return _compared(groups, root)


def _group(entries: Sequence[Entry]) -> Group:
  losses = [entry.loss for entry in entries if entry.loss is not None]
  setting = {k: v for k, v in entries[0].setting.items() if k != 'seed'}
  found = stats.interval(losses) if losses else None
  return Group(setting=setting, entries=tuple(entries), loss=found)


def _compared(groups: list[Group], root: str | os.PathLike[str]) -> list[Group]:
  losses = [item_losses(group, root) for group in groups]
  if not groups or losses[0] is None:
    return groups
  tests = {
    i: stats.paired(mine, losses[0])
    for i, mine in enumerate(losses)
    if i and mine is not None and mine.shape == losses[0].shape
  }
  corrected = dict(zip(tests, stats.holm([t.p for t in tests.values()]), strict=True))
  return [
    dataclasses.replace(group, versus=tests.get(i), p=corrected.get(i))
    for i, group in enumerate(groups)
  ]


def item_losses(group: Group, root: str | os.PathLike[str]) -> np.ndarray | None:
  """[items], the loss per token of each held-out row, the mean over a setting's seeds."""
  found = [items.read(pathlib.Path(root) / e.id) for e in group.entries if e.status == 'ok']
  pairs = [pair for pair in found if pair is not None]
  if not pairs or any(not np.array_equal(tokens, pairs[0][1]) for _, tokens in pairs):
    return None
  return np.mean([sums / tokens for sums, tokens in pairs], axis=0, dtype=np.float64)


def knobs(entries: Sequence[Entry]) -> list[str]:
  """The fields that the sweep set to more than one value, without the seed."""
  names = dict.fromkeys(name for entry in entries for name in entry.setting if name != 'seed')
  values = {n: {json.dumps(e.setting.get(n)) for e in entries} for n in names}
  return [name for name in names if len(values[name]) > 1]


def winners(groups: Sequence[Group], knob: str) -> list[Group]:
  """The best setting for each value of a field, the other fields at their best for it.

  So types are compared at the learning rate that suits each of them.
  """
  best: dict[str, Group] = {}
  for one in groups:
    if one.loss is not None and one.complete:
      best.setdefault(json.dumps(one.setting.get(knob)), one)
  return list(best.values())

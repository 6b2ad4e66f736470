"""Groups: how a decoder's layers lie in stacks, where they are not all of one kind."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from peftlab.models.config import DecoderConfig, LayerKind

Run = tuple[LayerKind, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Layers in a row that are kept in one stack.

  Attributes:
    start: number of the first layer.
    runs: layers of one kind in a row, and how many. One run is a plain stack of layers; several are
      a pattern: a stack of periods, each of which holds a stack per run.
    repeats: how often the runs follow each other.
  """

  start: int
  runs: tuple[Run, ...]
  repeats: int = 1

  @property
  def period(self) -> int:
    """Layers in one round of the runs."""
    return sum(count for _, count in self.runs)

  @property
  def nested(self) -> bool:
    """Whether it is a stack of stacks."""
    return len(self.runs) > 1

  def numbers(self, run: int = 0) -> np.ndarray:
    """Which layers a run holds: [count], or of a pattern [repeats, count]."""
    before = sum(count for _, count in self.runs[:run])
    inner = self.start + before + np.arange(self.runs[run][1])
    if not self.nested:
      return inner
    return inner[None, :] + self.period * np.arange(self.repeats)[:, None]


def groups(config: DecoderConfig) -> tuple[Group, ...]:
  """The groups of a decoder's layers; one plain group where all are of one kind."""
  return group_kinds([config.kind(i) for i in range(config.layers)])


def group_kinds(kinds: Sequence[Any]) -> tuple[Group, ...]:
  """Cuts a row of kinds into plain runs and repeated patterns, the longest stretch first come.

  A remainder that is shorter than its pattern becomes groups of its own:
  a a b a a b a -> (a a b) x 2, a.
  """
  found, start = [], 0
  while start < len(kinds):
    period, repeats = _longest(kinds[start:])
    runs = tuple(
      (kind, len(list(same))) for kind, same in itertools.groupby(kinds[start : start + period])
    )
    if len(runs) == 1:
      kind, count = runs[0]
      runs, repeats, period = ((kind, count * repeats),), 1, period * repeats
    found.append(Group(start=start, runs=runs, repeats=repeats))
    start += period * repeats
  return tuple(found)


def _longest(kinds: Sequence[Any]) -> tuple[int, int]:
  """(period, repeats) of what repeats longest from the start; the shortest period of those."""
  best = (1, 1)
  for period in range(1, len(kinds) // 2 + 1):
    repeats = 1
    while kinds[:period] == kinds[repeats * period : (repeats + 1) * period]:
      repeats += 1
    if repeats * period > best[0] * best[1] and (repeats > 1 or period == 1):
      best = (period, repeats)
  return best


def plain_path(path: tuple) -> tuple:
  """A path in `Decoder` without groups and runs: layers.0.runs.1.attn -> layers.attn."""
  if path[:1] != ('layers',):
    return path
  rest = path[1:]
  if rest and isinstance(rest[0], int):
    rest = rest[1:]
    if rest[:1] == ('runs',):
      rest = rest[2:]
  return ('layers', *rest)


def layers_at(path: tuple, config: DecoderConfig) -> np.ndarray:
  """Which layers the arrays under a path of `Decoder.layers` hold: an array, one axis per stack."""
  of = groups(config)
  if len(path) < 2 or not isinstance(path[1], int):
    return of[0].numbers()
  return of[path[1]].numbers(path[3] if path[2:3] == ('runs',) else 0)

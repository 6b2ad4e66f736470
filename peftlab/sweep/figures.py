"""The charts of a report: curves, loss by knob, trade-offs with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib

import numpy as np

from peftlab.sweep import space, stats, table
from peftlab.sweep.charts import COLORS, Mark, Point, Series, chart
from peftlab.sweep.table import Entry, Group
from peftlab.train import metrics, svg

Path = str | os.PathLike[str]
Card = tuple[str, str]

# Points of a curve, at most: a page of many trials stays small.
_POINTS = 120


def points(folder: pathlib.Path, kind: str) -> list[Point]:
  """(step, loss) of a trial, thinned."""
  found = [
    (float(r['step']), r['loss'])
    for r in metrics.read_metrics(folder)
    if r['kind'] == kind and r.get('loss') is not None
  ]
  if len(found) <= _POINTS:
    return found
  return [found[i] for i in np.linspace(0, len(found) - 1, _POINTS).astype(int)]


def _mean_curve(group: Group, root: Path, kind: str) -> list[Point]:
  """The mean over the seeds, at the steps that all of them have."""
  curves = [dict(points(pathlib.Path(root) / e.id, kind)) for e in group.entries]
  curves = [curve for curve in curves if curve]
  steps = set.intersection(*map(set, curves)) if curves else set()
  return [(step, float(np.mean([c[step] for c in curves]))) for step in sorted(steps)]


def curves(groups: Sequence[Group], root: Path) -> list[Card]:
  """Training and held-out loss by step; the best settings in colour, the others grey."""
  cards = []
  for kind, name in (('train', 'training, smoothed'), ('eval', 'held out')):
    series = []
    for i, group in reversed(list(enumerate(groups))):
      line = _mean_curve(group, root, kind)
      line = svg.smooth(line) if kind == 'train' else line
      label = _brief(group.setting) if i < COLORS else 'other settings'
      marks = [Mark(at=p, told=f'{group.label}: {p[1]:.4f} at step {p[0]:g}') for p in line]
      shown = marks if kind == 'eval' else ()
      series.append(Series(name=label, color=i, marks=shown, line=line))
    series.sort(key=lambda s: -s.color)
    labels = {'x_label': 'step', 'y_label': 'loss', 'title': f'Loss {name}'}
    drawn = chart(_clipped(series), **labels, decades=False)
    if drawn:
      cards.append((name, drawn))
  return cards


def _brief(setting: space.Setting) -> str:
  """'dora 8 0.003': in a legend the values alone will do."""
  return ' '.join(space.value_text(value) for value in setting.values()) or 'the experiment'


def _clipped(series: Sequence[Series]) -> list[Series]:
  """Without what lies far above where the curves begin: a diverged run would flatten all others."""
  starts = [s.line[0][1] for s in series if s.line]
  most = max(starts, default=0.0) * 1.25
  return [
    Series(
      name=s.name,
      color=s.color,
      marks=[m for m in s.marks if m.at[1] <= most],
      line=[p for p in s.line if p[1] <= most],
    )
    for s in series
  ]


def knobs(entries: Sequence[Entry], groups: Sequence[Group]) -> list[Card]:
  """The loss against every number that the sweep set; a colour per value of another knob."""
  names = table.knobs(entries)
  numbers = [n for n in names if all(_is_number(e.setting.get(n, 0)) for e in entries)]
  cards = []
  for name in numbers:
    other = next((n for n in (space.ADAPTER, *names) if n in names and n != name), None)
    values = list(dict.fromkeys(repr(e.setting.get(other)) for e in entries)) if other else ['']
    series = [
      _knob(name, other, value, i, entries, groups)
      for i, value in reversed(list(enumerate(values)))
    ]
    label = space.short(name)
    drawn = chart(series, x_label=label, y_label='held-out loss', title=f'Loss by {label}')
    if drawn:
      by = f', by {space.short(other)}' if other else ''
      cards.append((f'{label}{by}', drawn))
  return cards


def _is_number(value: object) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _knob(
  name: str,
  other: str | None,
  value: str,
  color: int,
  entries: Sequence[Entry],
  groups: Sequence[Group],
) -> Series:
  """Every trial a mark; the line joins the best mean at each value."""
  mine = [e for e in entries if name in e.setting and _is(e.setting, other, value)]
  marks = [
    Mark(at=(float(e.setting[name]), e.loss), told=f'{space.show(e.setting)}: {e.loss:.4f}')
    for e in mine
    if e.loss is not None
  ]
  best: dict[float, float] = {}
  for group in groups:
    if group.loss is not None and name in group.setting and _is(group.setting, other, value):
      best.setdefault(float(group.setting[name]), group.loss.mean)
  text = space.value_text(mine[0].setting.get(other)) if mine and other else ''
  return Series(name=text, color=color, marks=marks, line=sorted(best.items()))


def _is(setting: space.Setting, other: str | None, value: str) -> bool:
  return other is None or repr(setting.get(other)) == value


def tradeoffs(groups: Sequence[Group]) -> list[Card]:
  """Loss against bytes, against the time of a step, against forgetting; the front is ringed."""
  axes = {
    'adapter bytes': _bytes,
    'microseconds per token': _microseconds,
    'forgetting': forgetting,
  }
  cards = []
  for label, x in axes.items():
    found = [
      (g, at, g.loss.mean) for g in groups if g.loss is not None and (at := x(g)) is not None
    ]
    if len(found) < 2:
      continue
    front = stats.pareto([(a, b) for _, a, b in found])
    marks = [Mark(at=(a, b), told=f'{g.label}: {b:.4f}, {label} {a:,.4g}') for g, a, b in found]
    rings = [Mark(at=marks[i].at, told=marks[i].told, ring=True) for i in front]
    line = sorted(marks[i].at for i in front)
    series = [
      Series(name='settings', color=0, marks=marks),
      Series(name='not beaten in both', color=1, marks=rings, line=line),
    ]
    title = f'Loss against {label}'
    cards.append((title, chart(series, x_label=label, y_label='held-out loss', title=title)))
  return cards


def _microseconds(group: Group) -> float | None:
  rate = group.mean('tokens_per_second')
  return 1e6 / rate if rate else None


def _bytes(group: Group) -> float | None:
  return group.mean('bytes', 'adapter')


def forgetting(group: Group) -> float | None:
  """How much the loss on the second text rose, nats per token."""
  before, after = group.mean('second', 'before'), group.mean('second', 'after')
  return None if before is None or after is None else after - before


def curve(entry: Entry, root: Path) -> str:
  """The curves of one trial."""
  folder = pathlib.Path(root) / entry.id
  if not (folder / metrics.FILE).exists():
    return ''
  train, held = points(folder, 'train'), points(folder, 'eval')
  marks = [Mark(at=p, told=f'held out: {p[1]:.4f} at step {p[0]:g}') for p in held]
  series = [
    Series(name='training', color=COLORS, line=train),
    Series(name='held out', color=1, marks=marks, line=held),
  ]
  title = f'Loss of {entry.id}'
  return chart(series, x_label='step', y_label='loss', title=title, decades=False)

"""Charts of a sweep as inline SVG: points and lines in colours, either axis by powers of ten."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import html
import math

from peftlab.train import svg

Point = tuple[float, float]

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 42
COLORS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
  """A point.

  Attributes:
    at: (x, y).
    told: what a reader who points at it is told.
    ring: whether it is drawn as a ring around the point.
  """

  at: Point
  told: str
  ring: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
  """Marks and a line of one colour.

  Attributes:
    name: for the legend.
    color: 0 to `COLORS` - 1; above: grey.
    marks: points.
    line: (x, y), by x.
  """

  name: str
  color: int
  marks: Sequence[Mark] = ()
  line: Sequence[Point] = ()

  @property
  def style(self) -> str:
    """The class in the style sheet."""
    return f's{self.color}' if self.color < COLORS else 'other'


@dataclasses.dataclass(frozen=True)
class Axis:
  """Numbers -> 0 to 1."""

  low: float
  high: float
  log: bool

  @classmethod
  def of(cls, values: Sequence[float], *, decades: bool = True) -> Axis:
    """An axis that holds some values; by powers of ten where it may and they span 5-fold."""
    low, high = min(values), max(values)
    log = decades and low > 0 and high / low > 5
    if log:
      low, high = math.log10(low), math.log10(high)
    margin = (high - low or abs(high) or 1.0) * 0.06
    return cls(low - margin, high + margin, log)

  def at(self, value: float) -> float:
    """Where a value lies."""
    return ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)

  def ticks(self) -> list[float]:
    """Round numbers."""
    if not self.log:
      return svg.ticks(self.low, self.high)
    first, last = math.ceil(self.low), math.floor(self.high)
    tens = [10.0**e for e in range(first, last + 1)]
    more = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 3)]
    inside = [v for v in more if self.low <= math.log10(v) <= self.high]
    return tens if len(tens) > 3 else inside


def number(value: float) -> str:
  """3000000 -> '3M', 0.0003 -> '0.0003'."""
  for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
    if abs(value) >= size:
      return f'{value / size:g}{unit}'
  return f'{value:g}'


def chart(
  series: Sequence[Series], *, x_label: str, y_label: str, title: str, decades: bool = True
) -> str:
  """An SVG with its legend; '' where there is nothing to draw.

  Args:
    series: drawn in this order, the last on top.
    x_label: under the axis.
    y_label: at the top of the axis.
    title: for readers who hear the page.
    decades: whether an axis may go by powers of ten.
  """
  points = [p for s in series for p in (*(m.at for m in s.marks), *s.line)]
  if not points:
    return ''
  x, y = (Axis.of([p[i] for p in points], decades=decades) for i in range(2))
  label = html.escape(title)
  body = ''.join(_series(s, x, y) for s in series)
  return (
    f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"><title>{label}</title>'
    f'{_axes(x, y, x_label, y_label)}{body}</svg>{legend(series)}'
  )


def legend(series: Sequence[Series]) -> str:
  """The names of some series, the last drawn first; nothing for one alone."""
  named = {s.name: s for s in reversed(series) if s.name}
  if len(named) < 2:
    return ''
  spans = ''.join(
    f'<span><i class="{s.style}"></i>{html.escape(n)}</span>' for n, s in named.items()
  )
  return f'<div class="legend">{spans}</div>'


def _place(point: Point, x: Axis, y: Axis) -> Point:
  return (
    round(LEFT + x.at(point[0]) * (WIDTH - LEFT - RIGHT), 1),
    round(HEIGHT - BOTTOM - y.at(point[1]) * (HEIGHT - TOP - BOTTOM), 1),
  )


def _axes(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
  right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
  parts = []
  for value in y.ticks():
    at = round(HEIGHT - BOTTOM - y.at(value) * (HEIGHT - TOP - BOTTOM), 1)
    parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
    parts.append(f'<text x="{LEFT - 7}" y="{at + 4}" text-anchor="end">{number(value)}</text>')
  for value in x.ticks():
    at = round(LEFT + x.at(value) * (WIDTH - LEFT - RIGHT), 1)
    parts.append(f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{number(value)}</text>')
  middle = (LEFT + right) / 2
  parts += [
    f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>',
    f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>',
    f'<text x="0" y="13">{html.escape(y_label)}</text>',
  ]
  return ''.join(parts)


def _series(series: Series, x: Axis, y: Axis) -> str:
  parts = [f'<g class="{series.style}">']
  if len(series.line) > 1:
    path = ' '.join('{},{}'.format(*_place(p, x, y)) for p in series.line)
    parts.append(
      f'<polyline class="line" points="{path}"><title>{html.escape(series.name)}</title>'
    )
    parts.append('</polyline>')
  for mark in series.marks:
    cx, cy = _place(mark.at, x, y)
    kind = ' class="ring"' if mark.ring else ''
    radius = 8 if mark.ring else 4
    title = html.escape(mark.told)
    parts.append(f'<circle{kind} cx="{cx}" cy="{cy}" r="{radius}"><title>{title}</title></circle>')
  return ''.join([*parts, '</g>'])

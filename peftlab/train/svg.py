"""Line charts and bars as inline SVG, coloured by the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import html
import math

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 12, 30, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
  """One line of a chart.

  Attributes:
    name: for the legend.
    points: (x, y), by x.
    style: class in the style sheet: 'train', 'smooth', 'held-out'.
    dots: whether its points are marked.
  """

  name: str
  points: Sequence[Point]
  style: str
  dots: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
  """About `count` round numbers from `low` to `high`."""
  span = high - low or 1.0
  rough = span / count
  unit = 10 ** math.floor(math.log10(rough))
  step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclasses.dataclass(frozen=True)
class Scale:
  """Numbers -> places on the page."""

  x: Point
  y: Point

  def at(self, point: Point) -> Point:
    """(x, y) in the units of the SVG."""
    across = (point[0] - self.x[0]) / (self.x[1] - self.x[0])
    up = (point[1] - self.y[0]) / (self.y[1] - self.y[0])
    return (
      round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1),
      round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 1),
    )


def _scale(series: Sequence[Series]) -> Scale:
  xs = [x for s in series for x, _ in s.points]
  ys = [y for s in series for _, y in s.points]
  low, high = min(ys), max(ys)
  margin = (high - low or abs(high) or 1.0) * 0.06
  return Scale((min(xs), max(*xs, min(xs) + 1)), (low - margin, high + margin))


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, title: str) -> str:
  """An SVG of some lines; '' where there is no point at all.

  Args:
    series: drawn in this order, the last on top.
    x_label: under the axis.
    y_label: at the top of the axis.
    title: for readers who hear the page.
  """
  series = [s for s in series if s.points]
  if not series:
    return ''
  scale = _scale(series)
  parts = [
    f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
    f'<title>{html.escape(title)}</title>',
    *_axes(scale, x_label, y_label),
    *(_line(s, scale) for s in series),
    '</svg>',
  ]
  return ''.join(parts)


def _axes(scale: Scale, x_label: str, y_label: str) -> list[str]:
  parts = []
  right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
  for value in ticks(*scale.y):
    y = scale.at((scale.x[0], value))[1]
    parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
    parts.append(
      f'<text class="tick" x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{value:g}</text>'
    )
  for value in ticks(*scale.x):
    x = scale.at((value, scale.y[0]))[0]
    parts.append(
      f'<text class="tick" x="{x}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>'
    )
  parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
  middle = (_LEFT + right) / 2
  parts.append(
    f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">'
    f'{html.escape(x_label)}</text>'
  )
  parts.append(f'<text class="label" x="0" y="13">{html.escape(y_label)}</text>')
  return parts


def _line(series: Series, scale: Scale) -> str:
  places = [scale.at(point) for point in series.points]
  path = ' '.join(f'{x},{y}' for x, y in places)
  parts = [f'<g class="{series.style}">']
  if len(places) > 1:
    parts.append(f'<polyline class="line" points="{path}"/>')
  if series.dots or len(places) == 1:
    for (x, y), (step, value) in zip(places, series.points, strict=True):
      told = f'{series.name} at step {step:g}: {value:.4f}'
      parts.append(f'<circle cx="{x}" cy="{y}" r="4"><title>{html.escape(told)}</title></circle>')
  return ''.join([*parts, '</g>'])


def smooth(points: Sequence[Point], share: float = 0.1) -> list[Point]:
  """The running mean of a line, over a window that is a share of it, at least 5 points."""
  window = max(5, round(len(points) * share))
  found = []
  for i, (x, _) in enumerate(points):
    near = points[max(0, i - window // 2) : i + window // 2 + 1]
    found.append((x, sum(y for _, y in near) / len(near)))
  return found

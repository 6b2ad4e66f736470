"""One self-contained HTML page about some runs on one base: curves, samples, memory, sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import html
import math
import pathlib
from typing import Any

from peftlab import _report
from peftlab.train import metrics, svg
from peftlab.train.summary import Summary, show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
  """What the page tells of one run.

  Attributes:
    summary: see `summary.summarize`.
    records: see `metrics.read_metrics`.
    report: the table of sites.
    config: as JSON.
    command: what makes the run again.
  """

  summary: Summary
  records: Sequence[metrics.Record]
  report: _report.Report
  config: str
  command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cross:
  """Held-out losses of adapters on one another's text.

  Attributes:
    corpora: the columns.
    losses: {adapter or 'base': {corpus: nats per token}}, the rows.
  """

  corpora: Sequence[str]
  losses: Mapping[str, Mapping[str, float]]


def page(
  title: str,
  stories: Sequence[Story],
  *,
  memory: Mapping[str, int],
  cross: Cross | None = None,
  tiles: Mapping[str, str] | None = None,
) -> str:
  """The page as HTML; it loads nothing from anywhere.

  Args:
    title: of the page.
    stories: one per run.
    memory: see `summary.memory`.
    cross: of several runs, how each does on the others' text.
    tiles: more numbers for the top, {what it is: number}.
  """
  style = pathlib.Path(__file__).with_name('page.css').read_text(encoding='utf-8')
  ok = all(s.summary['status'] == 'ok' for s in stories)
  status = ', '.join(dict.fromkeys(s.summary['status'] for s in stories))
  body = [
    f'<h1>{_text(title)}<span class="badge{" ok" if ok else ""}">{_text(status)}</span></h1>',
    *(f'<p>{_headline(s)}</p>' for s in stories),
    _tiles(stories, tiles or {}),
    '<h2>Loss</h2><div class="cards three">',
    *(_curves(s) for s in stories),
    _before_after(stories),
    '</div>',
    _cross(cross) if cross else '',
    _samples(stories),
    _memory(stories, memory),
    _sites(stories),
    _rerun(stories),
    '<footer>Losses are nats per token. The page is one file and loads nothing.</footer>',
  ]
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<title>{_text(title)}</title><style>{style}</style></head>'
    f'<body><main>{"".join(body)}</main></body></html>\n'
  )


def _text(value: Any) -> str:
  return html.escape(str(value))


def _headline(story: Story) -> str:
  s = story.summary
  name = f'<b>{_text(s["name"])}</b>'
  if s['drop'] is None:
    return f'{name}: {_text(s["status"])} after {s["steps"]} steps.'
  word = 'fell' if s['drop'] > 0 else 'rose'
  return (
    f'{name}: held-out loss {word} from {s["held_out_before"]:.3f} to {s["held_out_after"]:.3f} '
    f'({_signed(-s["drop"])}) in {s["steps"]} steps.'
  )


def _signed(value: float) -> str:
  """-0.25 -> '−0.250', with the sign that is as wide as a plus."""
  return f'{value:+.3f}'.replace('-', '\N{MINUS SIGN}')


def size(count: float) -> str:
  """1536 -> '1.5 KiB'."""
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if count < 1024 or unit == 'GiB':
      return f'{count:.0f} {unit}' if unit == 'B' else f'{count:.1f} {unit}'
    count /= 1024
  raise AssertionError


def _tiles(stories: Sequence[Story], more: Mapping[str, str]) -> str:
  first = stories[0].summary
  rate = first['tokens_per_second']
  share = first['trainable'] / max(first['trainable'] + stories[0].report.total, 1)
  tiles = {
    'base, frozen': size(first['bytes']['base']),
    'each adapter' if len(stories) > 1 else 'adapter': size(first['bytes']['adapter']),
    'trainable numbers': f'{first["trainable"]:,}',
    'of the adapted layers': f'{100 * share:.2f} %',
    'base arrays untouched': first['base_identity'],
    'compilations of the step': str(first['compiles']),
    **({'tokens per second': f'{rate:,.0f}'} if rate else {}),
    **more,
  }
  inner = ''.join(
    f'<div class="tile"><b>{_text(v)}</b><span>{_text(k)}</span></div>' for k, v in tiles.items()
  )
  return f'<div class="tiles">{inner}</div>'


def _curves(story: Story) -> str:
  points = {
    kind: [(r['step'], r['loss']) for r in story.records if r['kind'] == kind and _told(r)]
    for kind in ('train', 'eval')
  }
  name = story.summary['name']
  series = [
    svg.Series(name='training', points=points['train'], style='train'),
    svg.Series(name='training, smoothed', points=svg.smooth(points['train']), style='smooth'),
    svg.Series(name='held out', points=points['eval'], style='held-out', dots=True),
  ]
  chart = svg.line_chart(series, x_label='step', y_label='loss', title=f'Loss of {name} by step')
  legend = ''.join(f'<span><i class="{s.style}"></i>{s.name}</span>' for s in series if s.points)
  return (
    f'<div class="card"><h3>{_text(name)}</h3>{chart or "<p>Nothing was recorded.</p>"}'
    f'<div class="legend">{legend}</div></div>'
  )


def _told(record: metrics.Record) -> bool:
  """Whether a record has a loss that a chart can show; 0 is one, NaN and infinity are not."""
  loss = record.get('loss')
  return loss is not None and math.isfinite(loss)


def _before_after(stories: Sequence[Story]) -> str:
  """Bars of the held-out losses, from 0."""
  bars = []
  losses = [s.summary[f'held_out_{when}'] for s in stories for when in ('before', 'after')]
  most = max((value for value in losses if value is not None), default=0.0) or 1.0
  for story in stories:
    for when in ('before', 'after'):
      value = story.summary[f'held_out_{when}']
      if value is not None:
        bar = f'<div class="{when}" style="width:{100 * value / most:.2f}%"></div>'
        name = _text(story.summary['name'])
        bars.append(f'<span>{name}, {when}</span>{bar}<span>{value:.3f}</span>')
  if not bars:
    return ''
  return f'<div class="card"><h3>Held out</h3><div class="bars">{"".join(bars)}</div></div>'


def _table(
  head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,)
) -> str:
  """A table of escaped cells; a cell that begins with '*' is marked as the best."""

  def cell(i: int, value: str) -> str:
    kinds = ['text'] * (i in text) + ['best'] * value.startswith('*')
    attribute = f' class="{" ".join(kinds)}"' if kinds else ''
    return f'<td{attribute}>{_text(value.removeprefix("*"))}</td>'

  top = ''.join(
    f'<th{" class=text" if i in text else ""}>{_text(h)}</th>' for i, h in enumerate(head)
  )
  lines = ''.join(f'<tr>{"".join(cell(i, v) for i, v in enumerate(row))}</tr>' for row in rows)
  return (
    f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'
  )


def _cross(cross: Cross) -> str:
  best = {c: min(losses[c] for losses in cross.losses.values()) for c in cross.corpora}
  rows = [
    [name, *(f'{"*" if losses[c] == best[c] else ""}{losses[c]:.3f}' for c in cross.corpora)]
    for name, losses in cross.losses.items()
  ]
  return (
    '<h2>Each adapter on each text</h2><p class=soft>Held-out loss; the best of a column is marked.'
    f'</p>{_table(["adapter", *cross.corpora], rows)}'
  )


def _samples(stories: Sequence[Story]) -> str:
  cards = [card for story in stories for card in _sample_cards(story)]
  if not cards:
    return ''
  return f'<h2>Held-out beginnings, continued</h2><div class="cards">{"".join(cards)}</div>'


def _sample_cards(story: Story) -> Iterator[str]:
  found = {r['step']: r['texts'] for r in story.records if r['kind'] == 'samples'}
  if not found:
    return
  first, last = min(found), max(found)
  for before, after in zip(found[first], found[last], strict=True):
    said = [('beginning', 'soft', before['prompt']), ('before', '', before['text'])]
    if last > first:
      said.append((f'after {last} steps', 'after', after['text']))
    inner = ''.join(
      f'<div class="tag">{tag}</div><div class="said {kind}">{_text(text.strip()) or "-"}</div>'
      for tag, kind, text in said
    )
    yield f'<div class="card"><h3>{_text(story.summary["name"])}</h3>{inner}</div>'


def _memory(stories: Sequence[Story], memory: Mapping[str, int]) -> str:
  parts = {'base, one for all' if len(stories) > 1 else 'base': stories[0].summary['bytes']['base']}
  for story in stories:
    for kind in ('adapter', 'optimizer'):
      parts[f'{kind} of {story.summary["name"]}'] = story.summary['bytes'][kind]
  parts['live arrays, all'] = memory['live']
  most = max(parts.values())
  bars = ''.join(
    f'<span>{_text(name)}</span><div style="width:{100 * count / most:.2f}%"></div>'
    f'<span title="{count:,} bytes">{size(count)}</span>'
    for name, count in parts.items()
  )
  return (
    f'<h2>Memory</h2><div class="card"><div class="bars">{bars}</div></div><p class="soft note">'
    f'Unique device buffers. The process held {size(memory["process_peak"])} at most, programs and '
    'libraries included.</p>'
  )


def _sites(stories: Sequence[Story]) -> str:
  parts = ['<h2>Adapted layers</h2>']
  shown: list[Any] = []
  for story in stories:
    report, name = story.report, story.summary['name']
    if report.rows in shown:
      parts.append(f'<p class="soft note">{_text(name)}: the same layers.</p>')
      continue
    shown.append(report.rows)
    rows = [
      [
        r.path,
        str(r.layers),
        f'{r.kernel[0]} x {r.kernel[1]}',
        r.spec,
        '  '.join(f'{n}{list(s)}' for n, s in r.slots.items()),
        f'{r.parameters:,}',
      ]
      for r in report.rows
    ]
    head = ['layer', 'layers', 'kernel', 'spec', 'slots', 'trainable']
    parts.append(_table(head, rows, text=(0, 4)))
    parts.append(
      f'<p class="soft note">{_text(name)}: {_text(report.adapter)}; {100 * report.coverage:.1f} % '
      f'of {report.total:,} linear weights adapted, by {report.trainable:,} trainable numbers.</p>'
    )
    if report.dropped:
      dropped = _text('\n'.join(map(str, report.dropped)))
      head = f'{len(report.dropped)} mesh axes dropped'
      parts.append(f'<details><summary>{head}</summary><pre>{dropped}</pre></details>')
  return ''.join(parts)


def _rerun(stories: Sequence[Story]) -> str:
  commands = dict.fromkeys(story.command for story in stories)
  parts = ['<h2>Again</h2>', *(f'<pre class="command">{_text(c)}</pre>' for c in commands)]
  for story in stories:
    s = story.summary
    numbers = f'{show(s["steps"])} steps, {show(s["skipped"])} skipped'
    parts.append(
      f'<details><summary>Config of {_text(s["name"])} ({numbers})</summary>'
      f'<pre>{_text(story.config)}</pre></details>'
    )
  return ''.join(parts)

"""The report of a sweep: report/index.html, one page that loads nothing; table.csv, table.md."""

from __future__ import annotations

from collections.abc import Sequence
import csv
import html
import io
import os
import pathlib
import shlex
from typing import Any

from peftlab.formats import files
from peftlab.sweep import figures, rows, space, table
from peftlab.sweep.table import Entry, Group
from peftlab.train import page
from peftlab.train.summary import show

FOLDER = 'report'
_FOOTER = 'Losses are nats per token on held-out text. The page is one file and loads nothing.'
CSV, MARKDOWN, PAGE = 'table.csv', 'table.md', 'index.html'


def write(
  root: str | os.PathLike[str],
  *,
  folder: str | os.PathLike[str] | None = None,
  title: str | None = None,
) -> pathlib.Path:
  """Writes the report of a root from its rows, whatever has ended so far.

  Args:
    root: of the sweep.
    folder: where it goes; None: ROOT/report, whose page links to those of single trials.
    title: of the page; None: the name of the root.

  Returns:
    The page.

  Raises:
    ValueError: there is no sweep in `root`, or a row is damaged.
  """
  entries = table.read(root)
  groups = table.group(entries, root)
  links = folder is None
  folder = pathlib.Path(root) / FOLDER if folder is None else pathlib.Path(folder)
  folder.mkdir(exist_ok=True, parents=True)
  name = title or pathlib.Path(root).resolve().name
  texts = {
    CSV: csv_table(groups),
    MARKDOWN: markdown(groups),
    PAGE: html_page(name, entries, groups, root, links=links),
  }
  for file, text in texts.items():
    content = text.encode()
    files.replace_file(folder / file, lambda out, content=content: out.write(content))
  return folder / PAGE


def head(groups: Sequence[Group]) -> list[str]:
  """The fields by which the settings differ, in the order of the sweep."""
  names = dict.fromkeys(name for group in groups for name in group.setting)
  return list(names)


def csv_table(groups: Sequence[Group]) -> str:
  """One line per setting, every number in full."""
  fields = head(groups)
  out = io.StringIO()
  writer = csv.writer(out, lineterminator='\n')
  numbers = ('mean_loss', 'low', 'high', 'difference', 'p_corrected', 'parameters', 'bytes')
  more = ('tokens_per_second', 'forgetting')
  writer.writerow([*fields, *rows.STATUSES, *numbers, *more, 'trials'])
  for group in groups:
    statuses = [sum(e.status == s for e in group.entries) for s in rows.STATUSES]
    values = [group.setting.get(name, '') for name in fields]
    ids = ' '.join(e.id for e in group.entries)
    writer.writerow([*map(space.value_text, values), *statuses, *_numbers(group), ids])
  return out.getvalue()


def _numbers(group: Group) -> list[Any]:
  loss = [group.loss.mean, group.loss.low, group.loss.high] if group.loss else ['', '', '']
  versus = group.versus.difference.mean if group.versus else ''
  rest = (
    group.p,
    group.mean('trainable'),
    group.mean('bytes', 'adapter'),
    group.mean('tokens_per_second'),
    figures.forgetting(group),
  )
  return [*loss, versus, *('' if value is None else value for value in rest)]


def markdown(groups: Sequence[Group]) -> str:
  """The table for a README."""
  fields = head(groups)
  names = [*map(space.short, fields), 'held-out loss', '95 % interval', 'seeds ok', 'to the best']
  names += ['p (Holm)', 'parameters']
  lines = [f'| {" | ".join(names)} |', f'| {" | ".join("---" for _ in names)} |']
  for group in groups:
    cells = [space.value_text(group.setting.get(name, '')) for name in fields]
    lines.append(f'| {" | ".join([*cells, *text_cells(group)])} |')
  return '\n'.join(lines) + '\n'


def text_cells(group: Group) -> list[str]:
  """Loss, interval, seeds, difference, p, parameters, as people read them."""
  loss = group.loss
  ok = sum(e.status == 'ok' for e in group.entries)
  parameters = group.mean('trainable')
  return [
    show(loss.mean if loss else None),
    f'{loss.low:.4f} to {loss.high:.4f}' if loss and loss.count > 1 else '-',
    f'{ok} of {len(group.entries)}',
    f'{group.versus.difference.mean:+.4f}' if group.versus else '-',
    p_text(group.p),
    '-' if parameters is None else f'{parameters:,.0f}',
  ]


def p_text(p: float | None) -> str:
  """0.00004 -> '< 0.001'."""
  if p is None:
    return '-'
  return '< 0.001' if p < 0.001 else f'{p:.3f}'


def html_page(
  title: str,
  entries: Sequence[Entry],
  groups: Sequence[Group],
  root: str | os.PathLike[str],
  *,
  links: bool = True,
) -> str:
  """The page as HTML; `links` says whether it links to the pages of single trials."""
  here = pathlib.Path(__file__)
  style = here.parents[1].joinpath('train', 'page.css').read_text(encoding='utf-8')
  style += here.with_name('report.css').read_text(encoding='utf-8')
  script = here.with_name('report.js').read_text(encoding='utf-8')
  statuses = [entry.status for entry in entries]
  ended = set(statuses) <= {'ok', 'diverged'}
  badge = f'<span class="badge{" ok" if ended else ""}">{"ended" if ended else "not ended"}</span>'
  body = [
    f'<h1>{_text(title)}{badge}</h1><p>{_text(rows.count(statuses))}.</p>',
    f'<p>{_headline(groups)}</p>',
    _winners(entries, groups),
    '<h2>Settings</h2>',
    _settings(groups),
    _notes(groups),
    *_charts(entries, groups, root),
    '<h2>Trials</h2>',
    *(_trial(entry, root, links=links) for entry in entries),
    f'<footer>{_FOOTER}</footer>',
  ]
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<title>{_text(title)}</title><style>{style}</style></head>'
    f'<body><main>{"".join(body)}</main><script>{script}</script></body></html>\n'
  )


def _text(value: Any) -> str:
  return html.escape(str(value))


def _headline(groups: Sequence[Group]) -> str:
  if not groups or groups[0].loss is None:
    return 'No trial has ended well yet.'
  best, loss = groups[0], groups[0].loss
  equal = [g for g in groups[1:] if g.p is not None and g.p >= 0.05]
  tested = sum(g.p is not None for g in groups)
  found = f'Lowest mean held-out loss: <b>{loss.mean:.4f}</b>, with {_text(best.label)}.'
  if not tested:
    return found
  if not equal:
    return f'{found} Each of the {tested} other settings differs from it (p below 0.05).'
  return (
    f'{found} {len(equal)} of {tested} other settings cannot be told from it (p at least 0.05).'
  )


def _winners(entries: Sequence[Entry], groups: Sequence[Group]) -> str:
  """Each adapter type, or the values of the first field, at its best other fields."""
  names = table.knobs(entries)
  if len(names) < 2:
    return ''
  knob = space.ADAPTER if space.ADAPTER in names else names[0]
  found = table.winners(groups, knob)
  cells = ''.join(
    f'<tr><td class="text">{_text(space.value_text(g.setting.get(knob)))}</td>'
    f'<td class="text">{_text(space.show({k: v for k, v in g.setting.items() if k != knob}))}</td>'
    f'{"".join(f"<td>{_text(cell)}</td>" for cell in text_cells(g))}</tr>'
    for g in found
  )
  heads = [space.short(knob), 'at', 'held-out loss', '95 % interval', 'seeds ok', 'to the best']
  heads += ['p (Holm)', 'parameters']
  top = ''.join(f'<th{" class=text" * (i < 2)}>{_text(n)}</th>' for i, n in enumerate(heads))
  return (
    f'<h2>Each {_text(space.short(knob))} at its best</h2><div class="wide"><table><thead><tr>{top}'
    f'</tr></thead><tbody>{cells}</tbody></table></div>'
  )


def _settings(groups: Sequence[Group]) -> str:
  fields = head(groups)
  names = [*map(space.short, fields), 'held-out loss', '95 % interval', 'seeds ok', 'to the best']
  names += ['p (Holm)', 'parameters', 'bytes', 'tokens/s', 'forgetting', 'trials']
  top = ''.join(f'<th><button type="button">{_text(name)}</button></th>' for name in names)
  body = ''.join(_setting_row(group, fields, best=not i) for i, group in enumerate(groups))
  choices = ''.join(f'<option>{status}</option>' for status in rows.STATUSES)
  return (
    '<div class="tools" data-table="settings">'
    '<input type="search" placeholder="filter: words" aria-label="Filter by words">'
    f'<select aria-label="Status"><option value="">any status</option>{choices}</select>'
    '<output></output></div>'
    f'<div class="wide"><table id="settings"><thead><tr>{top}</tr></thead>'
    f'<tbody>{body}</tbody></table></div>'
  )


def _setting_row(group: Group, fields: Sequence[str], *, best: bool) -> str:
  loss, interval, ok, versus, p, parameters = text_cells(group)
  mean = group.loss.mean if group.loss else ''
  size, rate, forgot = (
    group.mean('bytes', 'adapter'),
    group.mean('tokens_per_second'),
    figures.forgetting(group),
  )
  links = ' '.join(f'<a href="#{e.id}">{e.setting.get("seed", 0)}</a>' for e in group.entries)
  cells = [
    *(_cell(space.value_text(group.setting.get(f, '')), group.setting.get(f, '')) for f in fields),
    _cell(loss, mean, kind='best' if best and group.loss else ''),
    _cell(interval, group.loss.low if group.loss else '', kind='ci'),
    _cell(ok, ok, kind='' if group.complete else 'bad'),
    _cell(versus, group.versus.difference.mean if group.versus else ''),
    _cell(p, '' if group.p is None else group.p),
    _cell(parameters, parameters.replace(',', '').replace('-', '')),
    _cell('-' if size is None else page.size(size), '' if size is None else size),
    _cell('-' if rate is None else f'{rate:,.0f}', '' if rate is None else rate),
    _cell('-' if forgot is None else f'{forgot:+.4f}', '' if forgot is None else forgot),
    f'<td>{links}</td>',
  ]
  statuses = ' '.join(dict.fromkeys(entry.status for entry in group.entries))
  return f'<tr data-status="{statuses}">{"".join(cells)}</tr>'


def _cell(text: str, value: Any, *, kind: str = '') -> str:
  attribute = f' class="{kind}"' if kind else ''
  return f'<td{attribute} data-value="{_text(value)}">{_text(text)}</td>'


def _notes(groups: Sequence[Group]) -> str:
  seeds = min((len(g.entries) for g in groups), default=0)
  few = (
    f' With {seeds} seeds an interval over seeds is too narrow: it is at most their range.'
    if seeds < 5
    else ''
  )
  return (
    '<p class="soft note">The interval is a bootstrap over seeds. The difference to the best is '
    'tested on the same held-out rows (sign flips; the mean over the seeds of each row), and p is '
    'corrected for the number of settings (Holm). Only settings whose seeds are all ok can be the '
    f'best.{few} Tokens per second of a packed trial are its own share.</p>'
  )


def _charts(
  entries: Sequence[Entry], groups: Sequence[Group], root: str | os.PathLike[str]
) -> list[str]:
  sections = {
    'Loss by step': figures.curves(groups, root),
    'Loss by knob': figures.knobs(entries, groups),
    'Trade-offs': figures.tradeoffs(groups),
  }
  return [
    f'<h2>{name}</h2><div class="cards">'
    f'{"".join(f"<div class=card><h3>{_text(t)}</h3>{c}</div>" for t, c in cards)}</div>'
    for name, cards in sections.items()
    if cards
  ]


def _trial(entry: Entry, root: str | os.PathLike[str], *, links: bool) -> str:
  row = entry.row
  known = [
    ('held-out loss', f'{show(row.get("held_out_before"))} to {show(row.get("held_out_after"))}'),
    ('steps', show(row.get('steps'))),
    ('parameters', show(row.get('trainable'))),
    ('in a pack of', show(row.get('packed'))),
    ('seconds', show(row.get('seconds'))),
    ('ended', row.get('ended', '-')),
  ]
  numbers = ', '.join(f'{name} {value}' for name, value in known)
  error = f'<p>{_text(row["error"])}</p>' if row.get('error') else ''
  own = pathlib.Path(root) / entry.id / 'index.html'
  link = (
    f'<p><a href="../{entry.id}/index.html">its own page</a></p>' if links and own.exists() else ''
  )
  loss = show(entry.loss)
  return (
    f'<details class="trial" id="{entry.id}"><summary><b>{entry.id}</b> {entry.status}, {loss}, '
    f'{_text(space.show(entry.setting))}</summary><p>{_text(numbers)}.</p>{error}{link}'
    f'{figures.curve(entry, root)}'
    f'<pre class="command">{_text(shlex.join(["peftlab", *entry.command]))}</pre></details>'
  )

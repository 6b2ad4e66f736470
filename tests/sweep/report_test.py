"""The report tells every trial, compares with the best, loads nothing, and works in a browser."""

import csv
import html.parser
import io
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from peftlab.sweep import charts, report, table, tensorboard
from tests.sweep import made_up

BROWSER = next(filter(None, map(shutil.which, ('chromium', 'google-chrome', 'chrome'))), None)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  found = tmp_path_factory.mktemp('sweep')
  made_up.write(found)
  report.write(found, title='Made <up>')
  return found


@pytest.fixture(scope='module')
def groups(root):
  return table.group(table.read(root), root)


def test_the_best_setting_is_first_and_unfinished_ones_cannot_be_it(groups):
  best = groups[0]
  assert best.setting == {'adapter': 'dora', 'adapter.rank': 8, 'train.learning_rate': 3e-3}
  assert best.versus is None
  assert [g.complete for g in groups] == [True] * 13 + [False] * 2
  means = [g.loss.mean for g in groups if g.complete]
  assert means == sorted(means)
  assert all(g.loss.low <= g.loss.mean <= g.loss.high for g in groups)
  assert all(g.p < 0.05 for g in groups[1:])


def test_each_type_is_shown_at_its_own_best_rate(groups):
  found = table.winners(groups, 'adapter')
  assert [g.setting['adapter'] for g in found] == ['dora', 'lora', 'ia3']
  assert {g.setting['train.learning_rate'] for g in found} == {3e-3}


def test_the_csv_counts_every_status_and_names_every_trial(root):
  lines = list(csv.DictReader(io.StringIO((root / 'report' / 'table.csv').read_text())))
  assert len(lines) == 15
  counts = {s: sum(int(r[s]) for r in lines) for s in ('ok', 'diverged', 'failed', 'missing')}
  assert counts == {'ok': 42, 'diverged': 1, 'failed': 1, 'missing': 1}
  assert sum(len(r['trials'].split()) for r in lines) == 45
  assert lines[0]['parameters'] == '8000.0'


def test_the_markdown_has_a_line_per_setting(root):
  lines = (root / 'report' / 'table.md').read_text().splitlines()
  assert len(lines) == 17
  assert {line.count('|') for line in lines} == {lines[0].count('|')}
  assert lines[2].startswith('| dora | 8 | 0.003 | 1.9')


class Page(html.parser.HTMLParser):
  """The tags, ids and links of a page; an unclosed tag is an error."""

  def __init__(self):
    super().__init__()
    self.open, self.ids, self.links, self.sources = [], [], [], []

  def handle_starttag(self, tag, attrs):
    found = dict(attrs)
    self.ids.append(found.get('id'))
    self.links.append(found.get('href'))
    self.sources += [found[k] for k in ('src', 'srcset', 'data') if k in found]
    if tag not in ('meta', 'input', 'line', 'circle', 'br'):
      self.open.append(tag)

  def handle_endtag(self, tag):
    if tag not in ('line', 'circle'):
      assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(root):
  text = (root / 'report' / 'index.html').read_text()
  page = Page()
  page.feed(text)
  assert not page.open
  assert not page.sources
  assert not re.search(r'https?://|@import|url\(', text)
  links = {link for link in page.links if link}
  assert {link[1:] for link in links if link.startswith('#')} <= set(page.ids)
  assert len([link for link in links if link.startswith('#t')]) == 45
  assert 'Made &lt;up&gt;' in text
  assert 'adapter.rank is &lt;8&gt;' in text
  assert '45 trials: 42 ok, 1 diverged, 1 failed, 1 missing.' in text
  assert text.count('peftlab train --config=x.py') == 45
  titles = ('held out', 'learning_rate, by adapter', 'rank, by adapter', 'Loss against forgetting')
  for title in titles:
    assert f'<h3>{title}</h3>' in text


def test_a_diverged_run_does_not_flatten_the_curves(root):
  text = (root / 'report' / 'index.html').read_text()
  settings = text[text.index('Loss by step') : text.index('Loss by knob')]
  assert '>40<' not in settings


def test_an_axis_over_decades_has_round_ticks():
  axis = charts.Axis.of([3e-4, 1e-3, 1e-2])
  assert axis.log
  assert [charts.number(v) for v in axis.ticks()] == ['0.0003', '0.001', '0.003', '0.01']
  assert not charts.Axis.of([2, 8]).log
  assert charts.number(2_400_000) == '2.4M'


def test_tensorboard_gets_a_run_per_good_trial(root):
  folder = tensorboard.write(root)
  runs = [path for path in folder.iterdir() if path.is_dir()]
  assert len(runs) == 42
  (file,) = runs[0].glob('events.out.tfevents.*')
  content = file.read_bytes()
  assert b'hparams' in content
  assert b'train.learning_rate' in content
  tensorboard.write(root)
  assert {len(list(run.iterdir())) for run in runs} == {1}  # written anew, not beside


# What a reader does to the page; what they then see is put into its title.
ACTS = """
const seen = {errors: []};
addEventListener('error', (e) => seen.errors.push(e.message));
const table = document.getElementById('settings');
const column = (name) => [...table.tHead.rows[0].cells].findIndex((c) => c.textContent === name);
const values = (name) => [...table.tBodies[0].rows].filter((r) => r.offsetParent)
  .map((r) => r.cells[column(name)].textContent);
const press = (name) => table.tHead.rows[0].cells[column(name)].querySelector('button').click();
press('held-out loss'); seen.up = values('held-out loss');
press('held-out loss'); seen.down = values('held-out loss');
press('adapter'); seen.words = values('adapter');
const [input, select] = [document.querySelector('.tools input'), document.querySelector('select')];
input.value = 'LORA KiB'; input.dispatchEvent(new Event('input'));
seen.found = values('adapter'); seen.count = document.querySelector('output').textContent;
input.value = ''; input.dispatchEvent(new Event('input'));
select.value = 'diverged'; select.dispatchEvent(new Event('change'));
seen.diverged = values('rank');
const wide = document.documentElement; seen.width = wide.clientWidth;
seen.overflow = wide.scrollWidth - wide.clientWidth;
seen.charts = [...document.querySelectorAll('.card svg')].map((s) => s.clientWidth);
seen.small = [...document.querySelectorAll('td, p')].filter(
  (e) => parseFloat(getComputedStyle(e).fontSize) < 12).length;
document.title = 'SEEN' + JSON.stringify(seen) + 'END';
"""


@pytest.mark.skipif(BROWSER is None, reason='there is no Chromium here')
@pytest.mark.parametrize('width', (400, 1600))
def test_in_a_browser_it_sorts_filters_and_fits(root, tmp_path, width):
  text = (root / 'report' / 'index.html').read_text()
  page = tmp_path / 'page.html'
  page.write_text(text.replace('</body>', f'<script>{ACTS}</script></body>'))
  options = ('--headless', '--no-sandbox', '--disable-gpu', f'--window-size={width},900')
  assert BROWSER is not None
  folder = f'--user-data-dir={tmp_path / "browser"}'
  done = subprocess.run(
    [BROWSER, *options, folder, '--dump-dom', page.as_uri()],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  seen = json.loads(html.unescape(re.search(r'SEEN(.*)END', done.stdout)[1]))
  assert seen['errors'] == []
  assert seen['up'] == sorted(seen['up'], key=float)
  assert seen['down'] == seen['up'][::-1]
  assert seen['words'] == sorted(seen['words'])
  assert set(seen['found']) == {'lora'}
  assert seen['count'] == '6 of 15'
  assert seen['diverged'] == ['2']
  assert abs(seen['width'] - width) < 110  # headless windows have a least width
  assert seen['overflow'] <= 0
  assert seen['small'] == 0
  assert min(seen['charts']) >= 280


def test_nothing_has_ended_is_a_page_too(tmp_path):
  from peftlab.sweep import ledger, trials
  from tests.train import tiny

  made = trials.expand(tiny.experiment(), [{'seed': 0}, {'seed': 1}])
  ledger.add(tmp_path, made, {one.id: ['train'] for one in made})
  page = report.write(tmp_path)
  assert 'No trial has ended well yet.' in pathlib.Path(page).read_text()

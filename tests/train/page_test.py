"""The page: one file, nothing loaded, nothing unescaped; charts with round ticks."""

import dataclasses
import re

import pytest

import peftlab
from peftlab.plugins.lora import LoRA
from peftlab.train import page, svg
from tests.train import tiny

SUMMARY = {
  'name': '<b>bold</b>',
  'status': 'ok',
  'steps': 6,
  'held_out_before': 3.5,
  'held_out_after': 3.0,
  'drop': 0.5,
  'skipped': 0,
  'tokens_per_second': 12.0,
  'bytes': {'base': 4096, 'adapter': 100, 'optimizer': 200},
  'trainable': 25,
  'coverage': 1.0,
  'compiles': 1,
  'base_identity': '3/3',
}
RECORDS = [
  {'kind': 'eval', 'step': 0, 'loss': 3.5},
  {'kind': 'samples', 'step': 0, 'texts': [{'prompt': 'a<p', 'text': 'x & y'}]},
  *({'kind': 'train', 'step': i, 'loss': 3.5 - i / 10} for i in range(1, 7)),
  {'kind': 'eval', 'step': 6, 'loss': 3.0},
  {'kind': 'samples', 'step': 6, 'texts': [{'prompt': 'a<p', 'text': '</script>'}]},
]


def story(**changes):
  report = peftlab.attach(tiny.base_model(), LoRA(rank=2))[1]
  return page.Story(
    summary=SUMMARY | changes, records=RECORDS, report=report, config='{}', command='peftlab train'
  )


def made(*stories, **options):
  return page.page('A & B', stories, memory={'live': 9000, 'process_peak': 10**9}, **options)


def test_nothing_is_loaded_from_anywhere():
  text = made(story())
  assert not re.search(r'(src|href)\s*=|url\(|@import|https?://(?!arxiv)', text)
  assert '<script' not in text


def test_everything_is_escaped():
  text = made(story())
  for raw in ('<b>bold</b>', 'a<p', 'x & y', '</script>', 'A & B'):
    assert raw not in text
  assert 'x &amp; y' in text


def test_it_tells_what_a_reader_asks():
  cross = page.Cross(corpora=['t'], losses={'base': {'t': 3.5}, 'one': {'t': 3.0}})
  text = made(story(), story(name='two'), cross=cross, tiles={'added': '1 KiB'})
  for told in ('3.500', '3.000', '−0.500', 'layers.attn.q', '4.0 KiB', 'peftlab train', '3/3'):
    assert told in text, told
  assert '<td class="best">3.000</td>' in text
  assert text.count('<svg') == 2


def test_a_run_that_ended_badly_is_told():
  text = made(story(status='diverged', held_out_after=None, drop=None))
  assert 'diverged after 6 steps' in text
  assert 'badge ok' not in text


def test_a_loss_of_0_is_a_point_and_a_bar():
  records = [{'kind': 'eval', 'step': i, 'loss': loss} for i, loss in enumerate((0.0, None, 0.0))]
  of_nothing = dataclasses.replace(
    story(held_out_before=0.0, held_out_after=0.0, drop=0.0), records=records
  )
  text = made(of_nothing)
  assert text.count('<circle') == 2
  assert 'width:0.00%' in text


@pytest.mark.parametrize(
  ('low', 'high', 'expected'),
  (
    (0, 10, [0, 2, 4, 6, 8, 10]),
    (1.23, 1.31, [1.24, 1.26, 1.28, 1.3]),
    (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    (5, 5, [5, 5.2, 5.4, 5.6, 5.8, 6]),
  ),
)
def test_ticks_are_round(low, high, expected):
  assert svg.ticks(low, high)[: len(expected)] == (expected if low != high else [5])


def test_a_chart_keeps_its_points_inside():
  points = [(0, 5.0), (3, 2.0), (10, 3.0)]
  text = svg.line_chart(
    [svg.Series(name='x', points=points, style='train')], x_label='s', y_label='l', title='t'
  )
  places = re.search(r'points="([^"]*)"', text)[1].split()
  for x, y in (map(float, place.split(',')) for place in places):
    assert 0 <= x <= svg.WIDTH
    assert 0 <= y <= svg.HEIGHT


def test_an_empty_chart_is_nothing():
  assert svg.line_chart([], x_label='', y_label='', title='') == ''


def test_smoothing_keeps_a_constant_and_the_length():
  points = [(i, 2.0) for i in range(30)]
  assert svg.smooth(points) == points

"""The schedule of a pipeline: ticks, bubble, who runs what when, and divisions that do not fit."""

import jax
import numpy as np
import pytest

import peftlab
from peftlab.appliers import Pipeline, get_applier
from peftlab.appliers.schedule import schedule
from tests.appliers import pipelines

# (stages, layers, microbatches, more) -> ticks, written out. Plain: microbatches + stages - 1;
# circular: (repeats - 1) * max(microbatches, stages) more.
TICKS = {
  (4, 8, 4, ''): 7,
  (4, 4, 4, ''): 7,
  (2, 8, 8, ''): 9,
  (4, 8, 8, ''): 11,
  (4, 8, 8, 'repeats 2'): 19,
  (4, 8, 4, 'repeats 2'): 11,
  (4, 8, 2, 'repeats 2'): 9,
  (4, 16, 4, 'repeats 2, staged 8, last'): 11,
  (4, 30, 8, 'last'): 11,
  (4, 30, 8, 'first'): 11,
  (4, 30, 8, 'pad'): 11,
  (4, 30, 8, 'repeats 3, pad'): 27,
}


def plan(stages, layers, microbatches, more):
  words = {'rest': 'error'}
  for part in filter(None, more.split(', ')):
    name, _, number = part.partition(' ')
    words |= {name: int(number)} if number else {'rest': name}
  words = {'repeats': 1} | words
  return schedule(layers, stages=stages, microbatches=microbatches, **words)


@pytest.mark.parametrize('case', TICKS, ids=str)
def test_the_ticks_are_as_counted_by_hand(case):
  assert plan(*case).ticks == TICKS[case]


@pytest.mark.parametrize('stages', (2, 4))
@pytest.mark.parametrize('microbatches', (1, 4, 8))
def test_the_bubble_of_a_plain_pipeline(stages, microbatches):
  found = schedule(8, stages=stages, repeats=1, microbatches=microbatches)
  assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_repeats_make_the_bubble_smaller():
  bubbles = [schedule(8, stages=4, repeats=r, microbatches=8).bubble for r in (1, 2)]
  assert bubbles == pytest.approx([3 / 11, 3 / 19])


@pytest.mark.parametrize('case', TICKS, ids=str)
def test_every_microbatch_meets_every_staged_layer_in_order(case):
  """The ring is played through on numbers, with what moves between the ticks."""
  found = plan(*case)
  order = np.reshape(found.order, (found.stages, found.held))
  moving = [[] for _ in range(found.stages)]
  waiting = [[] for _ in range(found.microbatches)]
  for tick in range(found.ticks + 1):
    _, microbatch, arrived = found.work(found.stages, tick)
    if arrived:
      waiting[microbatch] = moving[0]
    after = []
    for stage in range(found.stages):
      repeat, microbatch, busy = found.work(stage, tick)
      seen = waiting[microbatch] if stage == 0 else moving[stage]
      start = repeat * found.depth
      after.append([*seen, *order[stage, start : start + found.depth]] if busy else ['idle'])
    moving = after[-1:] + after[:-1]
  staged = range(found.before, found.layers - found.after)
  for seen in waiting:
    assert [n for n in seen if n >= 0] == list(staged)
    assert seen.count(-1) == found.padding


@pytest.mark.parametrize('case', TICKS, ids=str)
def test_every_layer_has_one_place_and_every_stage_equally_many(case):
  found = plan(*case)
  assert len(found.order) == found.stages * found.held
  assert sorted(n for n in found.order if n >= 0) == list(range(found.layers))


def test_where_30_layers_on_4_stages_are():
  last = np.reshape(plan(4, 30, 8, 'last').order, (4, 8))
  np.testing.assert_array_equal(last[:, :7], np.arange(28).reshape(4, 7))
  np.testing.assert_array_equal(last[:, 7], [28, 29, -1, -1])
  first = np.reshape(plan(4, 30, 8, 'first').order, (4, 8))
  np.testing.assert_array_equal(first[:, :7], np.arange(2, 30).reshape(4, 7))
  np.testing.assert_array_equal(first[:, 7], [0, 1, -1, -1])
  np.testing.assert_array_equal(plan(4, 30, 8, 'pad').order, [*range(30), -1, -1])


def test_it_says_what_it_does():
  assert str(plan(4, 30, 8, 'last')) == (
    '4 stages x 1 repeats x 7 layers, 2 layers after them; 8 microbatches, 11 ticks, bubble 27%'
  )
  assert ', 2 of these places empty;' in str(plan(4, 30, 8, 'pad'))


BAD = {
  'layers': (lambda: plan(4, 30, 8, ''), "run 28 of 30 layers evenly; .*'first' or 'last'.*'pad'"),
  'layers, circular': (lambda: plan(4, 12, 8, 'repeats 2'), '4 stages x 2 repeats run 8 of 12'),
  'staged': (lambda: plan(4, 16, 8, 'staged 6, last'), r'staged=6.*must divide it.*are 4 or 8\.'),
  'staged too many': (lambda: plan(4, 8, 8, 'staged 12'), r'staged=12\): the stack has 8 layers'),
  'staged without rest': (
    lambda: plan(4, 16, 8, 'staged 8'),
    "8 of 16 layers evenly; .*'last'",
  ),
  'staged and padded': (lambda: plan(4, 16, 8, 'staged 8, pad'), "rest='pad'.*run 8 of 16"),
  'rest': (lambda: Pipeline(rest='lsat'), r"rest='lsat'\); did you mean 'last'\?"),
  'microbatches': (lambda: Pipeline(microbatches=0), r'microbatches=0\): it must be at least 1'),
  'repeats': (lambda: Pipeline(repeats=0), r'repeats=0\): it must be at least 1'),
  'remat': (lambda: Pipeline(remat='ful'), "No remat policy 'ful'; did you mean 'full'?"),
  'field': (
    lambda: get_applier('pipeline', microbatch=4),
    "no field 'microbatch'; did you mean 'microbatches'?",
  ),
  'mesh': (
    lambda: Pipeline().schedule(8, jax.make_mesh((8,), ('fsdp',), axis_types=(AUTO,))),
    "needs a mesh with an axis 'stage' in context .*; there is {'fsdp': 8}",
  ),
}
AUTO = jax.sharding.AxisType.Auto


@pytest.mark.parametrize('case', BAD)
def test_a_wrong_division_or_word_is_refused(case):
  make, message = BAD[case]
  with pytest.raises(ValueError, match=message):
    make()


def test_it_is_registered():
  assert get_applier('pipeline', microbatches=4) == Pipeline(microbatches=4)
  assert Pipeline(microbatches=8).for_batch(12).microbatches == 4


def test_no_mesh_is_said():
  parts = peftlab.split(pipelines.model(4).layers)
  with pytest.raises(ValueError, match=r"axis 'stage' in context .*; there is no mesh\."):
    Pipeline().apply(parts, pipelines.X, lambda layer, x: layer(x))

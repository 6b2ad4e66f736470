"""Every trial of a pack is what it is alone, ends alone, and leaves its neighbours in peace."""

import contextlib
import math

import chex
import numpy as np
import pytest

from peftlab import testing
from peftlab.sweep import items, pack_run, packing, rows
from peftlab.train import loop, metrics, run
from tests.sweep import tiny_sweep
from tests.train import tiny

STEPS = 20
# Every axis that packs, few to a trial: who differs tells by its name.
PACKED = {
  'seed': {'seed': 1},
  'schedule-dropout0-alpha-decay-steps': {
    'train__schedule': 'linear',
    'train__warmup_steps': 3,
    'train__learning_rate': 5e-4,
    'train__weight_decay': 0.3,
    'train__steps': 12,
    'adapter__dropout': 0.0,
    'adapter__alpha': 3.0,
  },
  'rank4-betas-init-order': {
    'train__b1': 0.5,
    'train__b2': 0.9,
    'adapter__rank': 4,
    'adapter__rslora': True,
    'adapter__init': 'gaussian',
    'data__shuffle': False,
  },
  'rank1-clip-eps-dropout': {
    'train__clip_norm': 0.05,
    'train__eps': 1e-3,
    'train__role_rates': ('b=4',),
    'adapter__rank': 1,
    'adapter__dropout': 0.5,
  },
}


@pytest.fixture(scope='module', autouse=True)
def setting():
  patch = pytest.MonkeyPatch()
  tiny_sweep.use_tiny(patch.setattr)
  with testing.quick_compiles():
    yield
  patch.undo()


def trials(*changes):
  usual = {'train__steps': STEPS, 'train__learning_rate': 2e-3}
  return [tiny_sweep.trial(**(usual | change)) for change in changes]


def alone(trial, folder):
  """The run of a trial by itself."""
  made = run.Run(trial.experiment, tiny.base_model(), tiny.text(), workdir=folder, say=lambda _: 0)
  loop.train([made], say=lambda _: 0)
  return made


def losses(folder):
  found = [(r['kind'], r['step'], r['loss']) for r in metrics.read_metrics(folder)]
  return {(kind, step): loss for kind, step, loss in found}


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
  root = tmp_path_factory.mktemp('packed')
  chosen = trials(*PACKED.values())
  (group,), others = packing.groups(chosen)
  assert not others
  assert pack_run.run(group, root=root, say=lambda _: 0) == 0
  return root, chosen


@pytest.mark.parametrize('index', range(len(PACKED)), ids=list(PACKED))
def test_a_packed_trial_is_what_it_is_alone(packed, tmp_path, index):
  root, chosen = packed
  trial = chosen[index]
  one = alone(trial, tmp_path)
  mine, its = losses(tmp_path), losses(root / trial.id)
  assert mine.keys() == its.keys()
  for key, loss in mine.items():
    np.testing.assert_allclose(its[key], loss, atol=1e-6, rtol=1e-6, err_msg=str(key))
  again = run.Run(trial.experiment, tiny.base_model(), tiny.text(), workdir=root / trial.id)
  again.close()
  assert again.step == trial.experiment.train.steps
  chex.assert_trees_all_close(again.parts.adapter, one.parts.adapter, atol=1e-6, rtol=1e-5)
  sums, tokens = items.read(root / trial.id)
  row = rows.read(root / trial.id)
  np.testing.assert_allclose(items.mean(sums, tokens), row['held_out_after'], rtol=1e-6)


class Countdown:
  """A flag that is set after it was read so many times."""

  def __init__(self, reads):
    self._left = reads

  @property
  def is_set(self):
    self._left -= 1
    return self._left < 0


def test_stopped_and_started_again_it_ends_bitwise_equal(packed, tmp_path, monkeypatch):
  root, chosen = packed
  monkeypatch.setattr(loop, 'preemption', lambda: contextlib.nullcontext(Countdown(7)))
  assert pack_run.run(chosen, root=tmp_path, say=lambda _: 0) == 42
  assert {rows.status(tmp_path / t.id) for t in chosen} == {'missing'}
  monkeypatch.undo()
  assert pack_run.run(chosen, root=tmp_path, say=lambda _: 0) == 0
  for trial in chosen:
    assert losses(tmp_path / trial.id) == losses(root / trial.id)


def test_trials_diverge_and_fail_alone_slots_are_taken_and_the_pack_shrinks(tmp_path):
  chosen = trials(
    {'train__steps': 6, 'train__learning_rate': 3e38},
    {'train__steps': 6},
    {'train__steps': 6, 'seed': 3},
    {'train__role_rates': ('nope=2',)},
  )
  said = []
  assert pack_run.run(chosen, root=tmp_path, size=2, shrink=True, say=said.append) == 1
  found = [rows.read(tmp_path / trial.id) for trial in chosen]
  assert [row['status'] for row in found] == ['diverged', 'ok', 'ok', 'failed']
  assert found[0]['held_out_after'] is None
  assert "'nope'" in found[3]['error']
  assert [line.split()[1] for line in said if line.startswith('pack:')] == ['2', '1']
  alone(chosen[2], tmp_path / 'alone')
  mine, its = losses(tmp_path / 'alone'), losses(tmp_path / chosen[2].id)
  assert mine.keys() == its.keys()
  for key, loss in mine.items():
    assert math.isclose(its[key], loss, rel_tol=1e-6, abs_tol=1e-6), key


@pytest.mark.parametrize(
  ('changes', 'reason'),
  (
    (({}, {'seed': 1, 'adapter__rank': 4, 'train__learning_rate': 0.5}), ''),
    (({'where': ('q',)}, {'where': ('v',)}), 'no other trial is equal'),
    (({'train__clip_norm': 0.0}, {'train__clip_norm': 1.0}), 'no other trial is equal'),
    (({'data__batch': 2}, {'data__batch': 4}), 'no other trial is equal'),
    (
      (
        {'train__optimizer': 'adafactor', 'adapter__rank': 33},
        {'train__optimizer': 'adafactor', 'adapter__rank': 40},
      ),
      'another update of adafactor',
    ),
  ),
)
def test_what_does_not_pack_says_why(changes, reason):
  packs, others = packing.groups(trials(*changes))
  if not reason:
    assert ([len(pack) for pack in packs], others) == ([2], [])
    return
  assert not packs
  assert len(others) == 2
  assert any(reason in why for _, why in others), others

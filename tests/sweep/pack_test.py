"""Every trial of a pack is what it is alone, ends alone, and leaves its neighbours in peace."""

import contextlib
import dataclasses
import math

import chex
from flax import nnx
import jax
import numpy as np
import pytest

import peftlab
from peftlab import testing
from peftlab.models.decoder import Decoder
from peftlab.plugins.adalora import AdaLoRA
from peftlab.sweep import items, jobs, pack_run, packing, rows
from peftlab.sweep import trials as sweep_trials
from peftlab.train import loop, metrics, run, session
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


def alone(trial, folder, base=None):
  """The run of a trial by itself."""
  base = base or tiny.base_model()
  made = run.Run(trial.experiment, base, tiny.text(), workdir=folder, say=lambda _: 0)
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
  assert not others, others
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
      tuple({'patterns': ('q:dropout=0.5',), 'adapter__dropout': rate} for rate in (0.1, 0.2)),
      'adapter.dropout differs, and patterns has a dropout of its own',
    ),
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


def base_in(dtype):
  """The tiny base in another dtype."""
  decoder = dataclasses.replace(tiny.DECODER, dtype=dtype)
  shapes = peftlab.split(nnx.eval_shape(lambda: Decoder(decoder, rngs=nnx.Rngs(0))))
  whole = peftlab.split(tiny.base_model()).base
  cast = jax.tree.map(lambda a, like: a.astype(like.dtype), whole, shapes.base)
  return peftlab.merge(shapes.replace(base=cast))


def test_in_bfloat16_a_packed_trial_is_near_what_it_is_alone(tmp_path, monkeypatch):
  base = base_in('bfloat16')
  monkeypatch.setattr(session, 'load_base', lambda experiment, *, say=print: (base, None))
  bfloat16 = {'base__dtype': 'bfloat16'}
  chosen = trials(bfloat16, bfloat16 | {'seed': 1, 'adapter__dropout': 0.1})
  (group,), others = packing.groups(chosen)
  assert not others, others
  assert pack_run.run(group, root=tmp_path, say=lambda _: 0) == 0
  for trial in chosen:
    alone(trial, tmp_path / 'alone' / trial.id, base)
    mine, its = losses(tmp_path / 'alone' / trial.id), losses(tmp_path / trial.id)
    assert mine.keys() == its.keys()
    for key, loss in mine.items():
      np.testing.assert_allclose(
        its[key], loss, rtol=packing.TOLERANCES['bfloat16'], err_msg=str(key)
      )


@pytest.mark.parametrize('dtype', ('float32', 'bfloat16', 'float16'))
def test_a_pack_that_is_only_near_is_told(tmp_path, dtype):
  chosen = trials(*({'base__dtype': dtype, 'seed': seed} for seed in (0, 1)))
  setup = jobs.Setup(source='x.py', base=tiny.experiment(), root=str(tmp_path))
  said = []
  (job,) = jobs.plan(chosen, setup, pack='auto', say=said.append)
  assert len(job.ids) == 2
  assert len(said) == (dtype != 'float32')
  assert all(f'base.dtype is {dtype}' in line and '--pack=off' in line for line in said)


@pytest.fixture
def ranks_meet():
  with jax.numpy_rank_promotion('allow'):
    yield


@pytest.mark.usefixtures('ranks_meet')
def test_numbers_that_a_type_reads_after_a_step_are_each_trials_own(tmp_path):
  """AdaLoRA smooths with beta1 what decides which ranks stay."""
  adapter = AdaLoRA(rank=4, target=1)
  usual = tiny.experiment(samples=0, sample_tokens=0, checkpoint_every=0, steps=8)
  usual = dataclasses.replace(usual, adapter=adapter)
  chosen = sweep_trials.expand(usual, [{'adapter.beta1': beta} for beta in (0.85, 0.05)])
  (group,), others = packing.groups(chosen)
  assert not others, others
  assert pack_run.run(group, root=tmp_path, say=lambda _: 0) == 0
  for trial in chosen:
    alone(trial, tmp_path / 'alone' / trial.id)
  mine, its = [[losses(r / t.id) for t in chosen] for r in (tmp_path / 'alone', tmp_path)]
  assert mine[0] != mine[1]
  for ours, theirs in zip(mine, its, strict=True):
    assert ours.keys() == theirs.keys()
    for key, loss in ours.items():
      np.testing.assert_allclose(theirs[key], loss, atol=1e-6, rtol=1e-6, err_msg=str(key))

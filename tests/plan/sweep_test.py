"""A sweep is planned program by program, and what does not fit is marked; no compiler is asked."""

import dataclasses

import pytest

from peftlab.plan import planning, program, sweep
from peftlab.sweep import trials
from tests.plan import estimate_test

GIB = 2**30
SETTINGS = [
  {'adapter.rank': rank, 'train.learning_rate': rate} for rank in (4, 64) for rate in (1e-3, 1e-2)
]


@pytest.fixture
def asked(monkeypatch):
  """Every plan that is asked for, as (rank, trials); of rank 64 two do not fit."""
  found = []

  def plan(experiment, topology, *, trials=1, packed=()):
    rank = max(e.adapter.rank for e in (experiment, *packed))
    found.append((rank, trials))
    total = (20 + trials * rank // 8) * GIB
    memory = program.Memory(total=total, limit=None if total < 31 * GIB else 31 * GIB)
    made = estimate_test.plan(memory=memory, trials=trials)
    return dataclasses.replace(made, topology=topology)

  monkeypatch.setattr(planning, 'plan', plan)
  return found


def some_trials():
  experiment = estimate_test.plan().experiment
  return trials.expand(experiment, SETTINGS)


def test_trials_of_one_size_share_a_program(asked):
  jobs = sweep.plan_sweep(some_trials(), 'v6e:2x4', say=lambda line: None)
  assert asked == [(4, 1), (64, 1)]
  assert [job.number for job in jobs] == [1, 1, 2, 2]
  assert [job.plan.fits for job in jobs] == [True] * 4


def test_packs_of_a_size_are_planned_as_they_would_run(asked):
  jobs = sweep.plan_sweep(some_trials(), 'v6e:2x4', pack=2, say=lambda line: None)
  assert asked == [(4, 2), (64, 2)]
  assert [len(job.trials) for job in jobs] == [2, 2]
  text = sweep.table(jobs)
  assert [line.split()[-1] for line in text.splitlines()] == ['fits', 'yes', 'yes', 'NO', 'NO']


def test_the_largest_pack_that_fits_is_found(asked):
  (job,) = sweep.plan_sweep(some_trials(), 'v6e:2x4', pack=0, say=lambda line: None)
  assert job.plan.trials == 1
  assert asked[0] == (64, 4)
  assert job.plan.fits

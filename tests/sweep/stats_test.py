"""Intervals, paired tests and corrections against scipy and against arithmetic written out."""

import numpy as np
import pytest
import scipy.stats

from peftlab.sweep import stats


def test_a_bootstrap_interval_is_that_of_scipy():
  values = np.random.default_rng(0).normal(2.0, 0.3, 12)
  mine = stats.interval(values)
  its = scipy.stats.bootstrap(
    (values,), np.mean, n_resamples=20_000, method='percentile', rng=np.random.default_rng(1)
  ).confidence_interval
  assert mine.mean == pytest.approx(np.mean(values))
  assert mine.low == pytest.approx(its.low, abs=0.006)
  assert mine.high == pytest.approx(its.high, abs=0.006)


def test_an_interval_of_one_value_is_that_value():
  assert stats.interval([2.5]) == stats.Interval(mean=2.5, low=2.5, high=2.5, count=1)
  with pytest.raises(ValueError, match='at least one'):
    stats.interval([])


def _scipy_p(one, other, resamples):
  return scipy.stats.permutation_test(
    (one, other),
    lambda a, b, axis: np.mean(a - b, axis=axis),
    permutation_type='samples',
    n_resamples=resamples,
    vectorized=True,
    rng=np.random.default_rng(2),
  ).pvalue


def test_a_paired_test_of_few_items_is_scipys_exact_one():
  rng = np.random.default_rng(3)
  one = rng.normal(size=9)
  other = one + rng.normal(0.3, 0.5, 9)
  assert stats.paired(one, other).p == pytest.approx(_scipy_p(one, other, np.inf), rel=1e-12)


def test_a_paired_test_of_many_items_is_scipys_within_chance():
  rng = np.random.default_rng(4)
  one = rng.normal(size=60)
  other = one + rng.normal(0.12, 0.5, 60)
  found = stats.paired(one, other)
  assert found.p == pytest.approx(_scipy_p(one, other, 20_000), abs=0.015)
  assert found.difference.mean == pytest.approx(np.mean(one - other))
  with pytest.raises(ValueError, match='as many'):
    stats.paired(one, other[1:])


def test_equal_settings_cannot_be_told_apart():
  same = np.arange(5.0)
  assert stats.paired(same, same).p == 1.0


def test_holm_by_hand():
  # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04; kept monotone.
  assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
  assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
  assert stats.holm([]) == []


def test_a_false_alarm_is_as_rare_as_holm_says():
  rng = np.random.default_rng(5)
  alarms = 0
  for _ in range(60):
    ps = [stats.paired(rng.normal(size=8), rng.normal(size=8)).p for _ in range(5)]
    alarms += min(stats.holm(ps)) < 0.05
  assert alarms <= 9  # 3 are expected; 10 or more have a chance of 0.001


def test_the_front_holds_what_nothing_beats_in_both():
  assert stats.pareto([(1, 5), (2, 3), (3, 3), (4, 1), (5, 2), (1, 5)]) == [0, 1, 3, 5]

"""Means, bootstrap intervals, paired tests, and their correction for how many there are."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

RESAMPLES = 10_000
# Up to so many pairs every assignment of signs is tried; beyond, `RESAMPLES` random ones.
_EXACT = 13


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A mean and where it may lie.

  Attributes:
    mean: of the values.
    low, high: bounds; the mean itself where there is one value alone.
    count: of values.
  """

  mean: float
  low: float
  high: float
  count: int


def interval(
  values: Sequence[float] | np.ndarray, *, level: float = 0.95, seed: int = 0
) -> Interval:
  """The mean with its bootstrap interval (percentiles of the means of resampled values).

  Of three values the interval is at most their range, and too narrow: it covers the true mean less
  often than `level` says. It is no substitute for more seeds.

  Args:
    values: one per seed; at least one.
    level: of confidence.
    seed: of the resampling.
  """
  array = np.asarray(values, np.float64)
  if not array.size:
    raise ValueError('An interval needs at least one value.')
  if array.size == 1:
    return Interval(mean=float(array[0]), low=float(array[0]), high=float(array[0]), count=1)
  rng = np.random.default_rng(seed)
  means = [
    array[rng.integers(0, array.size, (RESAMPLES // 10, array.size))].mean(axis=1)
    for _ in range(10)  # in parts, so that memory stays small with many values
  ]
  low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
  return Interval(mean=float(array.mean()), low=float(low), high=float(high), count=array.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
  """Two settings on the same items.

  Attributes:
    difference: the mean of first minus second, with its bootstrap interval over the items.
    p: of a sign-flip permutation test of that mean, two-sided.
  """

  difference: Interval
  p: float


def paired(one: np.ndarray, other: np.ndarray, *, seed: int = 0) -> Paired:
  """Compares the losses of two settings item by item.

  If the two were equal, each difference would have either sign with the same chance. p is the share
  of assignments of signs whose mean is at least as far from 0 as the one found.

  Args:
    one: [items], the loss of each.
    other: likewise, the same items in the same order.
    seed: of the random assignments.

  Raises:
    ValueError: other numbers of items, or none.
  """
  if one.shape != other.shape or not one.size:
    raise ValueError(f'Paired items must be as many: given {one.shape} and {other.shape}.')
  differences = np.asarray(one, np.float64) - np.asarray(other, np.float64)
  found = interval(differences, seed=seed)
  return Paired(difference=found, p=_sign_flips(differences, seed))


def _sign_flips(differences: np.ndarray, seed: int) -> float:
  count, observed = differences.size, abs(differences.mean())
  slack = observed * (1 - 1e-12)  # sums in another order are not another value
  if count <= _EXACT:
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=count)))
    return float(np.mean(np.abs(signs @ differences) / count >= slack))
  rng = np.random.default_rng(seed)
  hits = 0
  for _ in range(10):  # in parts, so that memory stays small with many items
    signs = rng.choice((-1.0, 1.0), (RESAMPLES // 10, count))
    hits += int(np.sum(np.abs(signs @ differences) / count >= slack))
  return (hits + 1) / (RESAMPLES + 1)


def holm(ps: Sequence[float]) -> list[float]:
  """p values corrected for their number (Holm 1979), in the order they were given."""
  order = sorted(range(len(ps)), key=lambda i: ps[i])
  found, most = [0.0] * len(ps), 0.0
  for rank, index in enumerate(order):
    most = max(most, min(1.0, (len(ps) - rank) * ps[index]))
    found[index] = most
  return found


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
  """The indices of the points that no other one is at most as large as in all and below in one."""
  return [
    i
    for i, mine in enumerate(points)
    if not any(
      other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in points
    )
  ]

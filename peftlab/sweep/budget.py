"""Equal budgets: the size of each adapter type at which it has so many parameters, or bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import re
from typing import Any
import warnings

from flax import nnx

from peftlab import _adapter, _attach
from peftlab.models import load
from peftlab.sweep import packing, space
from peftlab.train import fields
from peftlab.train.config import Experiment

KINDS = ('params', 'bytes')
_UNITS = {'': 1, 'K': 10**3, 'M': 10**6, 'G': 10**9, 'Ki': 2**10, 'Mi': 2**20, 'Gi': 2**30}
_MOST = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
  """What each adapter may take.

  Attributes:
    kind: 'params' (trainable numbers) or 'bytes' (of the adapter's arrays on one device).
    limit: how many.
  """

  kind: str
  limit: int


def parse(text: str) -> Budget:
  """'params:2.4M' -> a budget of 2,400,000 trainable numbers.

  Raises:
    ValueError: not KIND:NUMBER.
  """
  kind, _, number = text.partition(':')
  found = re.fullmatch(r'([\d.]+)(Ki|Mi|Gi|K|M|G|)', number)
  if kind not in KINDS or not found:
    raise ValueError(f'--budget is {text!r}; expected params:2.4M or bytes:10Mi, for example.')
  try:
    limit = float(found[1]) * _UNITS[found[2]]
  except ValueError as error:
    raise ValueError(f'--budget is {text!r}; {found[1]!r} is not a number.') from error
  return Budget(kind=kind, limit=int(limit))


def solve_settings(
  experiment: Experiment,
  settings: Iterable[space.Setting],
  budget: str,
  *,
  say: Callable[[str], None] = print,
) -> list[space.Setting]:
  """Each setting with the size of its adapter that fits the budget best, from below.

  Args:
    experiment: of the sweep.
    settings: none of them sets the size itself.
    budget: see `parse`.
    say: takes a line per adapter type, with what the size comes to.

  Raises:
    ValueError: a type without a size, or with several; a size set by the sweep as well.
  """
  wanted, found = parse(budget), []
  models: dict[Any, nnx.Module] = {}
  solved: dict[str, tuple[str, int, int]] = {}
  for setting in settings:
    resolved = space.resolve(experiment, setting)
    base = resolved.base
    if base not in models:
      models[base] = load.outline(base.source, dtype=base.dtype)
    key = fields.canonical(
      dataclasses.replace(resolved, seed=0, train=experiment.train, data=experiment.data)
    )
    if key not in solved:
      solved[key] = solve(resolved, models[base], wanted)
      name, size, count = solved[key]
      kind = type(resolved.adapter).__name__
      say(f'budget {budget}: {kind} {name}={size} has {count:,} {wanted.kind}')
    name, size, _ = solved[key]
    field = f'adapter.{name}'
    if field in setting:
      raise ValueError(f'The sweep sets {field}, and --budget solves it; leave one of them out.')
    found.append(setting | {field: size})
  return found


def solve(experiment: Experiment, model: nnx.Module, budget: Budget) -> tuple[str, int, int]:
  """(the field, its largest value that keeps to the budget, what that comes to).

  Args:
    experiment: its adapter and where it is attached.
    model: of shapes.
    budget: see there.

  Raises:
    ValueError: a type without a size, or with several; even a size of 1 is too much.
  """
  adapter = experiment.adapter
  kind, sizes = type(adapter).__name__, packing.sizes(adapter)
  if len(sizes) != 1:
    have = ', '.join(sizes) or 'none'
    raise ValueError(f'{kind} has no single size to solve for --budget; its sizes: {have}.')
  (name,) = sizes

  def count(size: int) -> int:
    return cost(dataclasses.replace(adapter, **{name: size}), experiment, model, budget.kind)

  if count(1) > budget.limit:
    raise ValueError(
      f'{kind} with {name}=1 has {count(1):,} {budget.kind}; the budget is {budget.limit:,}.'
    )
  low, high = 1, 2
  while high < _MOST and count(high) <= budget.limit:
    low, high = high, high * 2
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if count(middle) <= budget.limit else (low, middle)
  return name, low, count(low)


def cost(adapter: _adapter.Adapter, experiment: Experiment, model: nnx.Module, kind: str) -> int:
  """What an adapter takes on a model of shapes: trainable numbers, or bytes."""
  with warnings.catch_warnings():  # of sizes that are only tried; the trial itself will warn
    warnings.simplefilter('ignore')
    _, report = _attach.attach(
      model, experiment.spread(adapter), **experiment.targets, name='budget'
    )
  return report.trainable if kind == 'params' else report.nbytes

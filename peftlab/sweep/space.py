"""The space of a sweep: generators of settings, their product, an experiment for each setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

from peftlab import _registry
from peftlab.train import fields
from peftlab.train.config import Experiment

# {dotted field: value}; the key 'adapter' names a registered type, which comes with its defaults.
Setting = dict[str, Any]
Generator = Callable[[], Iterable[Setting]]

ADAPTER = 'adapter'
RATES = (3e-4, 1e-3, 3e-3, 1e-2)


def settings(generators: Mapping[str, Generator], names: Sequence[str]) -> list[Setting]:
  """The product of some axes of a sweep; the last one changes fastest.

  Args:
    generators: {name: a function that yields settings}.
    names: of the axes.

  Raises:
    ValueError: no such axis, an axis without a setting, or a field set by two axes.
  """
  axes = []
  for name in names:
    if name not in generators:
      near = _registry.did_you_mean(name, generators)
      known = ', '.join(generators) or 'none'
      raise ValueError(f'No sweep {name!r}{near or "."} Sweeps of the experiment: {known}.')
    if names.count(name) > 1:
      raise ValueError(f'Sweep {name!r} is given twice.')
    axes.append(_axis(name, generators[name]()))
  taken: dict[str, str] = {}
  for name, axis in zip(names, axes, strict=True):
    for field in dict.fromkeys(field for setting in axis for field in setting):
      if field in taken:
        raise ValueError(f'Sweeps {taken[field]!r} and {name!r} both set {field}.')
      taken[field] = name
  return [_merged(chosen) for chosen in itertools.product(*axes)]


def _axis(name: str, given: Iterable[Setting]) -> list[Setting]:
  axis = list(given)
  if not axis:
    raise ValueError(f'Sweep {name!r} yields no setting.')
  for setting in axis:
    if not isinstance(setting, Mapping) or not all(isinstance(k, str) for k in setting):
      raise ValueError(
        f'Sweep {name!r} yields {setting!r:.60}; expected a dict of fields, '
        "{'adapter.rank': 8} for example."
      )
  return [dict(setting) for setting in axis]


def _merged(chosen: Iterable[Setting]) -> Setting:
  return {field: value for setting in chosen for field, value in setting.items()}


def with_seeds(given: Sequence[Setting], *, first: int, count: int) -> list[Setting]:
  """Each setting once per seed, from `first` on; one that sets its seed stays as it is."""
  return [
    one
    for setting in given
    for one in (
      [setting] if 'seed' in setting else [setting | {'seed': first + i} for i in range(count)]
    )
  ]


def resolve(experiment: Experiment, setting: Setting) -> Experiment:
  """The experiment with a setting: the adapter type first, then the fields.

  Raises:
    ValueError: no such type or field, or a value that the field cannot take.
  """
  changes = dict(setting)
  name = changes.pop(ADAPTER, None)
  if name is not None:
    experiment = with_adapter(experiment, name)
  for field, value in changes.items():
    if isinstance(value, set | frozenset):
      raise ValueError(f'{field} is a set, {value!r}; expected a tuple, whose order is known.')
  return fields.replace(experiment, changes)


def with_adapter(experiment: Experiment, name: Any) -> Experiment:
  """The experiment with another adapter type, at its defaults.

  Raises:
    ValueError: not the name of a registered type.
  """
  if not isinstance(name, str):
    raise ValueError(f'adapter is {name!r:.60}; expected the name of a registered type.')
  return dataclasses.replace(experiment, adapter=_registry.adapters.get(name)())


def methods(
  names: Iterable[str],
  *,
  rates: Sequence[float] = RATES,
  also: Mapping[str, Any] | None = None,
) -> Iterable[Setting]:
  """Settings that compare adapter types, each at several learning rates.

  One rate for all types would compare how near it is to the best rate of each.

  Args:
    names: of registered types.
    rates: learning rates.
    also: further fields for every type, {'adapter.rank': 8}.
  """
  for name in names:
    for rate in rates:
      yield {ADAPTER: name, **(also or {}), 'train.learning_rate': rate}


def show(setting: Setting) -> str:
  """{'adapter.rank': 8, 'seed': 0} -> 'rank=8 seed=0'."""
  return ' '.join(f'{short(field)}={value_text(value)}' for field, value in setting.items())


def short(field: str) -> str:
  """The last word of a dotted field."""
  return field.rpartition('.')[2]


def value_text(value: Any) -> str:
  """A value as people write it: 0.001 -> '0.001', ('a', 'b') -> 'a,b'."""
  if isinstance(value, tuple | list):
    return ','.join(map(str, value))
  return f'{value:g}' if isinstance(value, float) else str(value)

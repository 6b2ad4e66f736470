"""Which trials one program can train together: they differ only in what it takes as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import json
from typing import Any

import jax
import numpy as np

from peftlab import _adapter, _parts, _registry
from peftlab.sweep import compatibility
from peftlab.sweep import numbers as number_slots
from peftlab.sweep.trials import UNCOUNTED, Trial
from peftlab.train import fields
from peftlab.train.config import Experiment
from peftlab.train.opt_state import StepOptions

# Fields of an experiment, outside the adapter, in which the trials of one pack may differ.
FREE = (
  'seed',
  'train.steps',
  'train.learning_rate',
  'train.schedule',
  'train.warmup_steps',
  'train.weight_decay',
  'train.b1',
  'train.b2',
  'train.eps',
  'train.clip_norm',
  'train.spike_skip',
  'train.role_rates',
  'train.samples',
  'train.sample_tokens',
  'data.shuffle',
  'data.max_rows',
  *(name for name in UNCOUNTED if name.startswith('train.')),
  'name',
)
# Options of a step that are part of a program; trials of a pack choose among its branches.
BRANCHED = tuple(f.name for f in dataclasses.fields(StepOptions) if f'train.{f.name}' in FREE)

# How far, relative to it, the loss of a packed trial may be from that of the trial alone after 20
# steps, by base.dtype: sums are taken in another order, and each is rounded to that dtype.
TOLERANCES = {'float32': 1e-6, 'bfloat16': 1e-2, 'float16': 2e-3}


def groups(trials: Iterable[Trial]) -> tuple[list[list[Trial]], list[tuple[Trial, str]]]:
  """(the packs, the trials that run alone with the reason), both in the order of the trials.

  Trials of one group are equal but for `FREE` fields and these fields of their adapters: those that
  only feed first values (`peftlab.initial`); sizes of slots, padded up to the largest; numbers.
  Of the last two a type must show that it computes the same with them, see `compatibility.check`.
  """
  together: dict[str, list[Trial]] = {}
  for trial in trials:
    together.setdefault(key(trial.experiment), []).append(trial)
  packs: list[list[Trial]] = []
  alone: list[tuple[Trial, str]] = []
  for group in together.values():
    if len(group) == 1:
      alone.append((group[0], 'for no other trial is equal to it but for what a pack can vary'))
      continue
    for part, why in _packs(group):
      if len(part) > 1:
        packs.append(part)
      else:
        alone.append((part[0], why))
  return packs, alone


def precision(pack: Sequence[Trial]) -> str:
  """A line on a pack whose losses are not, to 1e-6, those of its trials alone; '': they are."""
  dtype = pack[0].experiment.base.dtype
  if dtype == 'float32':
    return ''
  return (
    f'base.dtype is {dtype}: a packed trial has the loss that it has alone within '
    f'{TOLERANCES[dtype]:g} of it, not 1e-6; --pack=off makes each trial a process of its own'
  )


def key(experiment: Experiment) -> str:
  """Equal for experiments that may run in one pack."""
  adapter = experiment.adapter
  vary = {f'adapter.{name}' for name in varying_fields(adapter)}
  fixed = {
    leaf.name: leaf.value
    for leaf in fields.leaves(experiment)
    if leaf.name not in FREE and leaf.name not in vary
  }
  # What changes the structure of the optimizer's state, not only a number in it.
  train = experiment.train
  fixed |= {'clips': bool(train.clip_norm), 'has_b1': bool(train.b1)}
  return json.dumps([_registry.adapters.name_of(adapter), fixed], sort_keys=True, default=list)


def varying_fields(adapter: _adapter.Adapter) -> set[str]:
  """The fields of an adapter in which the trials of a pack may differ."""
  kinds = fields.kinds(type(adapter))
  free = _initial_fields(adapter)
  numbers = {name for name, kind in kinds.items() if kind is float}
  return free | numbers | set(sizes(adapter))


def sizes(adapter: _adapter.Adapter) -> dict[str, int]:
  """The fields of an adapter that are sizes of its slots: {'rank': 8}."""
  words = [word for slot in adapter.slots().values() for word in slot.dims.split()]
  own = {f.name for f in dataclasses.fields(adapter)}
  return {word: getattr(adapter, word) for word in words if word in own}


def carrier(adapters: Sequence[_adapter.Adapter]) -> _adapter.Adapter:
  """The adapter in whose graph others run: the largest sizes, and the numbers of one that draws.

  Raises:
    ValueError: the type refuses these fields together.
  """
  first = next((a for a in adapters if a.stochastic), adapters[0])
  largest = {name: max(sizes(a)[name] for a in adapters) for name in sizes(first)}
  return dataclasses.replace(first, **largest)


def numbers(adapters: Sequence[_adapter.Adapter]) -> tuple[str, ...]:
  """The number fields that differ between some adapters and that `apply` may read."""
  kinds = fields.kinds(type(adapters[0]))
  names = [f.name for f in dataclasses.fields(adapters[0]) if f.compare]
  return tuple(
    name for name in names if kinds[name] is float and len({getattr(a, name) for a in adapters}) > 1
  )


def numbers_of(template: Any, adapter: _adapter.Adapter) -> dict[tuple, Any]:
  """{path: array} of the number slots of a carrier's arrays, with the numbers of an adapter."""
  names = {number_slots.slot(f.name): f.name for f in dataclasses.fields(adapter)}
  return {
    path: jax.device_put(
      np.full(array.shape, number_slots.held(getattr(adapter, names[path[-1]]))), array.sharding
    )
    for path, array in _parts.flat(template).items()
    if path[-1] in names
  }


def _packs(group: Sequence[Trial]) -> list[tuple[list[Trial], str]]:
  """[(trials that run in one program, why they are not with the others)], together the group.

  Those that cannot run inside the largest of the group run with their equals.
  """
  fitting, others = _fitting(group)
  found = [(fitting, others[0][1] if others else '')] if fitting else []
  equal: dict[str, tuple[list[Trial], str]] = {}
  for trial, why in others:
    own, vary = trial.experiment.adapter, varying_fields(trial.experiment.adapter)
    fixed = {n: getattr(own, n) for n in vary if n not in _initial_fields(own)}
    equal.setdefault(repr(sorted(fixed.items())), ([], why))[0].append(trial)
  return [*found, *equal.values()]


def _initial_fields(adapter: _adapter.Adapter) -> set[str]:
  return {f.name for f in dataclasses.fields(adapter) if not f.compare}


def _fitting(group: Sequence[Trial]) -> tuple[list[Trial], list[tuple[Trial, str]]]:
  """(the trials that run in one program, the others with the reason)."""
  fitting: list[Trial] = []
  alone: list[tuple[Trial, str]] = []
  known: dict[Any, str] = {}
  adapters = [trial.experiment.adapter for trial in group]
  try:
    big = carrier(adapters)
  except ValueError as error:
    return [], [(trial, f'for {error}') for trial in group]
  varied = numbers(adapters)
  for name in varied:
    if name in group[0].experiment.targets['fields']:  # one array would stand for both
      why = f'for adapter.{name} differs, and patterns has a {name} of its own for some layers'
      return [], [(trial, why) for trial in group]
  for trial in group:
    train, adapter = trial.experiment.train, trial.experiment.adapter
    identity = (repr(adapter), train.optimizer)
    if identity not in known:
      known[identity] = compatibility.check(adapter, big, varied, StepOptions.of(train))
    if known[identity]:
      alone.append((trial, known[identity]))
    else:
      fitting.append(trial)
  return fitting, alone

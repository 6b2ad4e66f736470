"""A trial: an experiment with an id that follows from what it computes, and its command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import hashlib
import json
from typing import Any

from peftlab import _registry
from peftlab.sweep import space
from peftlab.train import fields
from peftlab.train.config import IMMATERIAL, Experiment

# Counts up when a config of the same fields comes to mean something else.
VERSION = 1
# Fields that are not in the id: a name, and what changes how a run is computed, not what.
UNCOUNTED = ('name', *IMMATERIAL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """One run of a sweep.

  Attributes:
    id: 't' and 12 hex digits.
    setting: what the sweep set.
    experiment: the resolved config; its name is the id.
  """

  id: str
  setting: space.Setting
  experiment: Experiment

  @property
  def label(self) -> str:
    """'rank=8 seed=0'."""
    return space.show(self.setting)


def trial_id(experiment: Experiment) -> str:
  """The id of a config: equal for equal resolved configs, whatever sweep or flags made them.

  Raises:
    ValueError: a value that JSON has no words for, by field.
  """
  counted = {
    leaf.name: _plain(leaf) for leaf in fields.leaves(experiment) if leaf.name not in UNCOUNTED
  }
  adapter = _registry.adapters.name_of(experiment.adapter)
  text = json.dumps([VERSION, adapter, counted], sort_keys=True, separators=(',', ':'))
  return f't{hashlib.sha256(text.encode()).hexdigest()[:12]}'


def _plain(leaf: fields.Leaf) -> Any:
  """The value for JSON; a float is written as one, for 1 and 1.0 are one number."""
  value = list(leaf.value) if isinstance(leaf.value, tuple) else leaf.value
  try:
    json.dumps(value, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{leaf.name} is {leaf.value!r:.60}, which no id can be made of.') from error
  return value


def expand(experiment: Experiment, settings: Iterable[space.Setting]) -> list[Trial]:
  """The trials of some settings, in their order.

  Raises:
    ValueError: a setting that does not fit, or two that come to one trial.
  """
  found: dict[str, Trial] = {}
  for setting in settings:
    try:
      resolved = space.resolve(experiment, setting)
    except ValueError as error:
      raise ValueError(f'Setting {space.show(setting)}: {error}') from error
    name = trial_id(resolved)
    if name in found:
      raise ValueError(
        f'Settings {found[name].label!r} and {space.show(setting)!r} come to one trial; '
        f'what they differ in changes nothing that is computed ({", ".join(UNCOUNTED)} do not).'
      )
    named = dataclasses.replace(resolved, name=name)
    found[name] = Trial(id=name, setting=dict(setting), experiment=named)
  return list(found.values())


def flags(base: Experiment, experiment: Experiment) -> list[str]:
  """The flags that make `experiment` of `base`, for a command line.

  Raises:
    ValueError: a field that no flag can set to its value.
  """
  found = []
  names = [_registry.adapters.name_of(e.adapter) for e in (base, experiment)]
  if names[0] != names[1]:
    found.append(f'--config.adapter={names[1]}')
    base = space.with_adapter(base, names[1])
  before = {leaf.name: leaf.value for leaf in fields.leaves(base)}
  changed = [leaf for leaf in fields.leaves(experiment) if leaf.value != before[leaf.name]]
  return found + [f'--config.{leaf.name}={_flag_value(leaf)}' for leaf in changed]


def _flag_value(leaf: fields.Leaf) -> str:
  if leaf.value is None:
    raise ValueError(f'{leaf.name} is none, and was not before; no flag says that.')
  if isinstance(leaf.value, tuple):
    return repr(leaf.value) if leaf.value else ''
  if isinstance(leaf.value, bool):
    return str(leaf.value).lower()
  return repr(leaf.value) if isinstance(leaf.value, float) else str(leaf.value)


def command(
  trial: Trial, *, source: str, base: Experiment, root: str, more: Sequence[str] = ()
) -> list[str]:
  """The command line of a trial, from the word 'train' on.

  Args:
    trial: which.
    source: of the experiment, as --config takes it.
    base: what that gives without flags.
    root: of the sweep.
    more: further flags.
  """
  return [
    'train',
    f'--config={source}',
    *flags(base, trial.experiment),
    f'--workdir={root}/{trial.id}',
    '--trial',
    *more,
  ]

"""Flags of a subcommand: an experiment's fields by ml_collections, the others by absl."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
import dataclasses
import re
import typing
from typing import Any

from absl import flags
import ml_collections
from ml_collections import config_flags

from peftlab import _registry
from peftlab.cli import _experiments, _plugins
from peftlab.train import adapter_words, fields
from peftlab.train.config import Experiment

_PREFIX = '--config.'
_ADAPTER = 'adapter'
_CONFIG = ('--config', f'{_PREFIX}FIELD')


def parse(
  argv: Sequence[str], define: Callable[[flags.FlagValues], None]
) -> tuple[Experiment, flags.FlagValues]:
  """The experiment that some arguments describe, and the other flags; in any order.

  `--config=FILE` gives the experiment, `--config.adapter=NAME` another adapter type with its
  defaults, `--config.FIELD=VALUE` a field.

  Args:
    argv: the arguments.
    define: defines the other flags.

  Raises:
    ValueError: an unknown flag, field, adapter or file, or a value of the wrong type.
  """
  source, adapter, changes, rest = _sort(argv)
  values = flags.FlagValues()
  define(values)
  if source is None:
    _parse(values, rest, extra=_CONFIG)
    raise ValueError(
      '--config is missing; expected a file, or one of: ' + ', '.join(_experiments.names()) + '.'
    )
  experiment = _experiments.load(source)
  if adapter is not None:
    adapter_type = _registry.adapters.get(adapter)
    experiment = dataclasses.replace(experiment, adapter=_defaults(adapter, adapter_type))
  overrides = _overrides(experiment, changes)
  _parse(values, rest, extra=_CONFIG)
  return fields.replace(experiment, overrides), values


def parse_plain(argv: Sequence[str], define: Callable[[flags.FlagValues], None]) -> Any:
  """The flags of a subcommand that takes no experiment.

  Raises:
    ValueError: an unknown flag, or a value of the wrong type.
  """
  values = flags.FlagValues()
  define(values)
  _parse(values, list(argv))
  return values


def _defaults(name: str, adapter_type: type) -> Any:
  try:
    return adapter_type()
  except TypeError as error:
    raise ValueError(f'Adapter {name!r} has a field without a default: {error}.') from error


def source(argv: Sequence[str]) -> str | None:
  """What --config is given, None where it is not."""
  return _sort(argv)[0]


def _sort(argv: Sequence[str]) -> tuple[str | None, str | None, list[tuple[str, Any]], list[str]]:
  """Arguments -> (--config, --config.adapter, [(field, its value or None)], the others)."""
  source, adapter = None, None
  changes: list[tuple[str, Any]] = []
  rest: list[str] = []
  waiting = list(argv)
  while waiting:
    argument = waiting.pop(0)
    name, equals, value = argument.partition('=')
    dashed = '--' + name.lstrip('-') if name.startswith('-') else name
    if dashed != '--config' and not re.match(r'--(no)?config\.', dashed):
      rest.append(argument)
      continue
    if not equals and waiting and not waiting[0].startswith('-'):
      value, equals = waiting.pop(0), '='
    if dashed == '--config':
      source = value
    elif dashed == _PREFIX + _ADAPTER:
      adapter = value
    else:
      changes.append((dashed, value if equals else None))
  return source, adapter, changes, rest


def _overrides(experiment: Experiment, changes: list[tuple[str, Any]]) -> dict[str, Any]:
  """{dotted name: value} of the field flags, read by ml_collections."""
  leaves = {leaf.name: leaf for leaf in fields.leaves(experiment)}
  argv: list[str] = []
  lists: dict[str, list[str]] = {}
  for flag, value in changes:
    off = flag.startswith('--no')
    name = flag.removeprefix('--no' if off else '--').removeprefix('config.')
    kind = _kind(name, flag, leaves)
    if typing.get_origin(kind) is tuple:
      lists.setdefault(name, []).append(value or '')
    elif value is None and kind is not bool:
      raise ValueError(f'Flag {flag} has no value; expected {fields.describe(kind)}.')
    else:
      argv.append(flag if value is None else f'{flag}={value}')
  argv += [f'{_PREFIX}{name}={_items(given)!r}' for name, given in lists.items()]
  values = flags.FlagValues()
  config_flags.DEFINE_config_dict(
    'config', _config_dict(leaves), flag_values=values, sys_argv=['peftlab', *argv]
  )
  _parse(values, argv, leaves)
  flag: Any = values['config']
  return dict(flag.override_values)


def _kind(name: str, flag: str, leaves: dict[str, fields.Leaf]) -> Any:
  if name in leaves:
    return leaves[name].kind
  inner = [known for known in leaves if known.startswith(f'{name}.')]
  if inner:
    raise ValueError(f'Flag {flag} is a section; give one of its fields: {", ".join(inner)}.')
  section = name.rpartition('.')[0]
  beside = [known for known in leaves if known.startswith(f'{section}.')] if section else []
  known = beside or [*leaves, _ADAPTER]
  # A word that is right but in the wrong section is nearer than a similar one.
  moved = [k for k in leaves if k.rpartition('.')[2] == name.rpartition('.')[2]]
  near = f"; did you mean '{_PREFIX}{moved[0]}'?" if moved else ''
  if not near:
    near = _registry.did_you_mean(_PREFIX + name, [_PREFIX + k for k in known])
  hint = f' Fields of {section}: ' if beside else ' Fields: '
  raise ValueError(f'No flag {flag!r}{near or "."}{hint}{", ".join(known)}.')


def _items(given: list[str]) -> tuple:
  """The items of a list flag: repeated, separated by commas, or a Python tuple or list."""
  items: list[Any] = []
  for text in given:
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # plain words, or a regular expression
      value = None
    if isinstance(value, tuple | list):
      items += value
    else:
      items += adapter_words.split(text)
  return tuple(items)


def _config_dict(leaves: dict[str, fields.Leaf]) -> ml_collections.ConfigDict:
  tree: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *sections, last = name.split('.')
    inside = tree
    for section in sections:
      inside = inside.setdefault(section, {})
    value = leaf.value
    if value is None:
      value = ml_collections.config_dict.placeholder(typing.get_args(leaf.kind)[0])
    inside[last] = value
  return ml_collections.ConfigDict(tree, convert_dict=True)


def _parse(
  values: flags.FlagValues,
  argv: list[str],
  leaves: dict[str, fields.Leaf] | None = None,
  extra: tuple[str, ...] = (),
) -> None:
  """Reads the flags of absl; `extra` are others that the command takes, for messages."""
  try:
    rest = values(['peftlab', *argv])[1:]
  except flags.UnrecognizedFlagError as error:
    known = [*(f'--{name}' for name in values), *extra, _plugins.NAME]
    near = _registry.did_you_mean(f'--{error.flagname}', known)
    choices = f'Flags: {", ".join(known)}.'
    raise ValueError(f"No flag '--{error.flagname}'{near or '.'} {choices}") from error
  except flags.IllegalFlagValueError as error:
    raise ValueError(_illegal(str(error), leaves or {})) from error
  except flags.Error as error:
    raise ValueError(f'{str(error).rstrip(".")}.') from error
  if rest:
    raise ValueError(f"Unexpected argument '{rest[0]}'; flags are written --NAME=VALUE.")


def _illegal(message: str, leaves: dict[str, fields.Leaf]) -> str:
  """'flag --config.seed=x: invalid literal ...' -> what was given and what was expected."""
  found = re.match(r'flag --(?P<name>[\w.]+)=(?P<value>.*?): (?P<why>.*)', message, re.DOTALL)
  if not found:
    return f'{message.rstrip(".")}.'
  leaf = leaves.get(found['name'].removeprefix('config.'))
  wanted = f'expected {fields.describe(leaf.kind)}' if leaf else found['why'].rstrip('.')
  return f"Flag --{found['name']} is '{found['value']}'; {wanted}."

"""The help of a subcommand: its flags, and every field of an experiment with type and default."""

from __future__ import annotations

import shutil
import textwrap
import typing
from typing import Any

from absl import flags

from peftlab import _registry
from peftlab.cli import _experiments, _plugins
from peftlab.train import fields
from peftlab.train.config import Experiment

# What absl writes behind the help of a flag that may be repeated.
_REPEAT = 'repeat this option to specify a list of values'


def wanted(argv: list[str]) -> bool:
  """Whether help is asked for."""
  return any(argument in ('-h', '--help', '--helpfull', '-help') for argument in argv)


def show_flags(values: flags.FlagValues) -> str:
  """The flags that absl knows."""
  every = [_flag(values[name]) for name in values]
  return '\n'.join([*every, _entry(f'{_plugins.NAME}=...', '', _plugins.HELP)])


def _flag(flag: flags.Flag) -> str:
  if isinstance(flag, flags.MultiFlag):
    text = flag.help.removesuffix(_REPEAT).rstrip().rstrip(';')
    return _entry(f'--{flag.name}=...', '', f'{text} (may be given several times)')
  return _entry(f'--{flag.name}', _default(flag.default), flag.help)


def show_fields(experiment: Experiment) -> str:
  """The fields of an experiment, as flags."""
  names = ', '.join(_experiments.names())
  lines = [_entry('--config=FILE', '', f'a file with get_config(), or one of: {names}')]
  section = None
  for leaf in fields.leaves(experiment):
    if leaf.name.partition('.')[0] != section:
      section = leaf.name.partition('.')[0]
      if section == 'adapter':
        lines.append(_adapter(experiment))
    kind = _kind(leaf.kind)
    lines.append(_entry(f'--config.{leaf.name}', _default(leaf.value), f'{leaf.doc} ({kind})'))
  return '\n'.join(lines)


def _adapter(experiment: Experiment) -> str:
  name = _registry.adapters.name_of(experiment.adapter)
  text = f'an adapter type, with its own defaults: {", ".join(_registry.adapters.names())}'
  return _entry('--config.adapter', name, text)


def _kind(kind: Any) -> str:
  if typing.get_origin(kind) is tuple:
    return f'{fields.describe(kind)}: by commas, or the flag repeated'
  return fields.describe(kind)


def _default(value: Any) -> str:
  if value is None or isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple | list):
    return ','.join(map(str, value)) or "'' (none)"
  return str(value) or "''"


def _entry(flag: str, default: str, text: str) -> str:
  head = f'  {flag}={default}' if default else f'  {flag}'
  width = max(60, min(shutil.get_terminal_size().columns, 110))
  body = textwrap.wrap(' '.join(text.split()), width - 38) or ['']
  if len(head) > 36:
    return '\n'.join([head, *(' ' * 38 + line for line in body)])
  return '\n'.join([f'{head:<38}{body[0]}', *(' ' * 38 + line for line in body[1:])])

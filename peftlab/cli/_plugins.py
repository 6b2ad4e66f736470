"""--plugin=FILE.py, which every subcommand takes: adapter types from a file anywhere."""

from __future__ import annotations

from collections.abc import Sequence

NAME = '--plugin'
HELP = 'a Python file that registers adapter types (may be given several times)'

_given: list[str] = []


def load(argv: Sequence[str]) -> list[str]:
  """The arguments without --plugin; the types of its files are registered.

  Raises:
    ValueError: it has no value; see `load_plugin`.
  """
  _given.clear()
  rest, waiting = [], list(argv)
  while waiting:
    argument = waiting.pop(0)
    name, equals, file = argument.partition('=')
    if name not in (NAME, NAME[1:]):
      rest.append(argument)
      continue
    if not equals and waiting and not waiting[0].startswith('-'):
      file = waiting.pop(0)
    if not file:
      raise ValueError(f'Flag {NAME} has no value; expected a Python file.')
    from peftlab._plugin_file import load_plugin

    load_plugin(file)
    _given.append(file)
  return rest


def given() -> tuple[str, ...]:
  """The files of this command, which what it starts needs too."""
  return tuple(_given)

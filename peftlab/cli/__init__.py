"""The command `peftlab`: one file per subcommand, imported only when it is asked for."""

from __future__ import annotations

import ast
from collections.abc import Sequence
import importlib
import pathlib
import sys
import traceback

from peftlab._registry import did_you_mean

USER_ERROR = 2


def subcommands() -> dict[str, str]:
  """{name: what it does}, read from the files beside this one without importing them."""
  found = {}
  for path in sorted(pathlib.Path(__file__).parent.glob('[a-z]*.py')):
    doc = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    found[path.stem.replace('_', '-')] = doc.splitlines()[0]
  return found


def usage() -> str:
  """What `peftlab --help` prints."""
  width = max(map(len, subcommands())) + 2
  lines = [f'  {name.ljust(width)}{doc}' for name, doc in subcommands().items()]
  head = 'peftlab SUBCOMMAND [--flag=value ...]; peftlab SUBCOMMAND --help lists its flags.'
  return '\n'.join([head, '', *lines])


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a subcommand.

  Args:
    argv: without the program's name; default: those of the process.

  Returns:
    The exit code: 0 done, 1 diverged, 2 something for the user to mend, 42 stopped and saved.
  """
  name, *rest = list(sys.argv[1:] if argv is None else argv) or ['--help']
  try:
    if name in ('--help', '-h', 'help'):
      print(usage())
      return 0
    if name not in subcommands():
      near = did_you_mean(name, subcommands())
      raise ValueError(f'No command {name!r}{near or "."} Commands: {", ".join(subcommands())}.')
    return importlib.import_module(f'peftlab.cli.{name.replace("-", "_")}').run(rest)
  except ValueError as error:
    if not _for_user(error):
      raise
    print(f'peftlab: {" ".join(str(error).split())}', file=sys.stderr)
    return USER_ERROR
  except KeyboardInterrupt:
    print('peftlab: interrupted', file=sys.stderr)
    return 130


def _for_user(error: ValueError) -> bool:
  """Whether peftlab itself raised it; what comes from below is a defect and keeps its traceback."""
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  return frame.f_globals.get('__name__', '').split('.')[0] == 'peftlab'

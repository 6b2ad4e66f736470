"""The command `peftlab`: one file per subcommand, imported only when it is asked for."""

from __future__ import annotations

import ast
from collections.abc import Sequence
import importlib
import os
import pathlib
import sys
import time
import traceback
import typing
from typing import TextIO
import warnings

from peftlab._registry import did_you_mean
from peftlab.cli import _memory, _plugins

FAILED, USER_ERROR, STOPPED, INTERRUPTED, DIED, READER_GONE = 1, 2, 42, 130, 134, 141


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
  codes = 'Exit codes: 0 done, 1 diverged or not passed, 2 something to mend (one line says what), '
  return '\n'.join([head, '', *lines, '', f'{codes}42 SIGTERM, 130 Ctrl-C.'])


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a subcommand.

  Args:
    argv: without the program's name; default: those of the process.

  Returns:
    The exit code: 0 done, 1 diverged, 2 something for the user to mend, 42 stopped by SIGTERM and
    saved, 130 interrupted by Ctrl-C, 141 nobody reads the output any more.
  """
  name, *rest = list(sys.argv[1:] if argv is None else argv) or ['--help']
  try:
    code = _guarded(name, rest)
  except Exception as error:
    if not _joined():
      raise
    traceback.print_exc()
    code = _code_of(error)
  if code not in (0, STOPPED, INTERRUPTED) and _joined():
    _leave(code)
  return code


def _guarded(name: str, rest: list[str]) -> int:
  """The exit code of a subcommand, mistakes of the user told in one line."""
  try:
    with warnings.catch_warnings():
      warnings.showwarning = _show_warning
      return _run(name, rest)
  except ValueError as error:
    if not _for_user(error):
      raise
    print(f'peftlab: {" ".join(str(error).split())}', file=sys.stderr)
    return USER_ERROR
  except (MemoryError, RuntimeError) as error:
    line = _memory.told(error)
    if line is None:
      raise
    print(f'peftlab: {line}', file=sys.stderr)
    return USER_ERROR
  except BrokenPipeError:  # who reads our output has seen enough, as `head` has
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE
  except OSError as error:
    where = f" '{error.filename}'" if error.filename else ''
    print(f'peftlab: {error.strerror or error}{where}.', file=sys.stderr)
    return USER_ERROR
  except KeyboardInterrupt:
    print('peftlab: interrupted', file=sys.stderr)
    return INTERRUPTED


def _run(name: str, rest: list[str]) -> int:
  if name in ('--help', '-h', 'help'):
    print(usage())
    return 0
  if name not in subcommands():
    near = did_you_mean(name, subcommands())
    raise ValueError(f'No command {name!r}{near or "."} Commands: {", ".join(subcommands())}.')
  return importlib.import_module(f'peftlab.cli.{name.replace("-", "_")}').run(_plugins.load(rest))


def _joined() -> bool:
  """Whether this process is one of several of one run."""
  jax = sys.modules.get('jax')
  return jax is not None and jax.distributed.is_initialized()


def _code_of(error: Exception) -> int:
  from peftlab.train import joining

  return DIED if joining.of_another(error) else FAILED


def _leave(code: int) -> typing.NoReturn:
  """Ends the process at once: by the usual way it would wait for others that may never come."""
  import jax

  sys.stdout.flush()
  sys.stderr.flush()
  if jax.process_index() == 0:
    time.sleep(1.0)  # the others are connected to this one, and may be about to say the same
  os._exit(code)


def _show_warning(
  message: Warning | str,
  category: type[Warning],
  filename: str,
  lineno: int,
  file: TextIO | None = None,
  line: str | None = None,
) -> None:
  """A warning as one line; where in the code it was given is nothing to a person."""
  del category, filename, lineno, file, line
  print(f'peftlab: warning: {" ".join(str(message).split())}', file=sys.stderr)


def _for_user(error: ValueError) -> bool:
  """Whether peftlab itself raised it; what comes from below is a defect and keeps its traceback."""
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  return frame.f_globals.get('__name__', '').split('.')[0] == 'peftlab'

"""Experiment files: found by path or by name, loaded, and asked for their config."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import importlib
import importlib.util
import pathlib
import pkgutil
import sys
import traceback
import types
from typing import Any

from peftlab._registry import did_you_mean
from peftlab.formats import files
from peftlab.train.config import Experiment

_PACKAGE = 'peftlab.experiments'


def names() -> list[str]:
  """The experiments that come with peftlab."""
  package = importlib.import_module(_PACKAGE)
  return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load(source: str) -> Experiment:
  """The config of an experiment.

  Args:
    source: a file ('experiments/demo.py') or the name of one that comes with peftlab ('demo'); what
      follows a colon is given to its `get_config`.

  Raises:
    ValueError: no such file or name, a mistake in the file, or a `get_config` that gives no config.
  """
  name, *argument = source.split(':', 1)
  module = _module(name)
  if not callable(getattr(module, 'get_config', None)):
    raise ValueError(f"Experiment '{name}' has no function get_config().")
  try:
    config = module.get_config(*argument)
  except (Exception, SystemExit) as error:
    raise _mistake(name, error) from error
  if not isinstance(config, Experiment):
    kind = type(config).__name__
    raise ValueError(f"Experiment '{name}': get_config() gives a {kind}, expected an Experiment.")
  return config


def sweeps(source: str) -> dict[str, Callable[[], Iterable[dict[str, Any]]]]:
  """The sweeps of an experiment: {NAME: its function sweep_NAME}, in the order of the file.

  Args:
    source: see `load`.

  Raises:
    ValueError: see `load`.
  """
  module = _module(source.split(':', 1)[0])
  found = {n: f for n, f in vars(module).items() if n.startswith('sweep_') and callable(f)}
  return {n.removeprefix('sweep_'): f for n, f in found.items()}


def _module(name: str) -> types.ModuleType:
  path = pathlib.Path(name)
  if path.suffix != '.py' and '/' not in name:
    if name not in names():
      near = did_you_mean(name, names())
      raise ValueError(
        f'No experiment {name!r}{near or "."} Give a file, or one of: {", ".join(names())}.'
      )
    spec = importlib.util.find_spec(f'{_PACKAGE}.{name}')
  elif not path.is_file():
    near = f"; did you mean '{path.stem}'?" if path.stem in names() else ''
    near = files.near_path(path, suffixes=('.py',)) or near
    raise ValueError(f"No experiment file '{name}'{near or '.'}")
  else:
    spec = importlib.util.spec_from_file_location(f'{_PACKAGE}.{path.stem}', path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  before = sys.modules.get(spec.name)
  sys.modules[spec.name] = module  # dataclasses in the file look themselves up there
  try:
    spec.loader.exec_module(module)
  except (Exception, SystemExit) as error:
    if before is None:
      del sys.modules[spec.name]
    raise _mistake(name, error) from error
  return module


def _mistake(name: str, error: BaseException) -> ValueError:
  """What an experiment file raised, as one line that names the line in the file."""
  if isinstance(error, SyntaxError):
    return ValueError(f"Experiment '{name}', line {error.lineno}: {error.msg}.")
  file = pathlib.Path(name).with_suffix('.py').name
  frames = list(traceback.walk_tb(error.__traceback__))
  lines = [line for f, line in frames if pathlib.Path(f.f_code.co_filename).name == file]
  last = frames[-1][0]
  inside = pathlib.Path(last.f_code.co_filename).name == file
  if isinstance(error, ValueError) and not inside and _is_ours(last):
    return ValueError(str(error))  # it says what it is about
  where = f', line {lines[-1]}' if lines else ''
  kind = type(error).__name__
  return ValueError(f"Experiment '{name}'{where}: {kind}: {str(error).rstrip('.')}.")


def _is_ours(frame: types.FrameType) -> bool:
  return frame.f_globals.get('__name__', '').split('.')[0] == 'peftlab'

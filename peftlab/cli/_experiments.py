"""Experiment files: found by path or by name, loaded, and asked for their config."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import pkgutil
import sys
import traceback
import types

from peftlab._registry import did_you_mean
from peftlab.train.config import Experiment

_PACKAGE = 'peftlab.experiments'
# What a mistake in an experiment file raises.
_MISTAKES = (SyntaxError, ImportError, NameError, TypeError, AttributeError, LookupError)


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
  except _MISTAKES as error:
    raise ValueError(_mistake(name, error)) from error
  if not isinstance(config, Experiment):
    kind = type(config).__name__
    raise ValueError(f"Experiment '{name}': get_config() gives a {kind}, expected an Experiment.")
  return config


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
    beside = [str(found) for found in path.parent.glob('*.py')]
    near = did_you_mean(name, beside)
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
  except _MISTAKES as error:
    if before is None:
      del sys.modules[spec.name]
    raise ValueError(_mistake(name, error)) from error
  return module


def _mistake(name: str, error: Exception) -> str:
  if isinstance(error, SyntaxError):
    return f"Experiment '{name}', line {error.lineno}: {error.msg}."
  lines = [
    frame.lineno
    for frame in traceback.extract_tb(error.__traceback__)
    if pathlib.Path(frame.filename).name == pathlib.Path(name).with_suffix('.py').name
  ]
  where = f', line {lines[-1]}' if lines else ''
  return f"Experiment '{name}'{where}: {type(error).__name__}: {str(error).rstrip('.')}."

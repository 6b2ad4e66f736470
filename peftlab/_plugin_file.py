"""Loads a plugin from a file anywhere, and says which adapter types it registers."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import traceback
import types

from peftlab import _adapter, _registry
from peftlab.formats import files


def load_plugin(file: str) -> dict[str, type[_adapter.Adapter]]:
  """The adapter types that a Python file registers, by name.

  A file that is already imported (a plugin of peftlab's own) is not loaded a second time.

  Raises:
    ValueError: no such file, an error in it (with its line), a name that another type has, or no
      adapter type in it.
  """
  path = pathlib.Path(file)
  if path.suffix != '.py' or not path.is_file():
    near = files.near_path(path, suffixes=('.py',))
    raise ValueError(f"No Python file '{file}'{near or '.'}")
  before = {name: _registry.adapters.get(name) for name in _registry.adapters.names()}
  module = _imported(path) or _load(path)
  found = {
    name: kind
    for name in _registry.adapters.names()
    if (kind := _registry.adapters.get(name)) is not before.get(name)
    or kind.__module__ == module.__name__
  }
  if not found:
    raise ValueError(
      f"'{file}' registers no adapter type; put @peftlab.register_adapter('NAME') over one."
    )
  return found


def _imported(path: pathlib.Path) -> types.ModuleType | None:
  for module in list(sys.modules.values()):
    file = getattr(module, '__file__', None)
    if file and file.endswith(path.name) and pathlib.Path(file).resolve() == path.resolve():
      return module
  return None


def _load(path: pathlib.Path) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(f'plugin_file.{path.stem}', path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses in the file look themselves up there
  sys.path.insert(0, str(path.resolve().parent))
  try:
    spec.loader.exec_module(module)
  except (Exception, SystemExit) as error:
    del sys.modules[spec.name]
    raise ValueError(_mistake(path, error)) from error
  finally:
    sys.path.remove(str(path.resolve().parent))
  return module


def _mistake(path: pathlib.Path, error: BaseException) -> str:
  if isinstance(error, SyntaxError) and error.filename == str(path):
    return f"'{path}', line {error.lineno}: {error.msg}."
  lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
  where = f', line {lines[-1]}' if lines else ''
  kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
  return f"'{path}'{where}: {kind}{str(error).rstrip('.')}."

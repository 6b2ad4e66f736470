"""Writes the BUILD files from the imports: one target per module and per test, with its true deps.

`python tools/build_files.py` writes them, `--check` only says which are not as it would write them.
What the imports do not tell (sizes, modules imported by name) is in tools/build_extras.toml.
"""

import argparse
import collections
import pathlib
import sys
import tomllib
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tools import imports

FOLDERS = ('peftlab', 'tests', 'tools', 'benchmarks')
# The root package of each folder's modules: an import of one of these must have a target.
_OURS = ('peftlab', 'tests', 'tools', 'benchmarks')
_DATA_SUFFIXES = ('.css', '.html', '.js', '.json', '.svg')
_ON_CHECKOUT = pathlib.Path('tests/project')  # its tests read the checkout: bazel does not run them
_ALL = 'all_modules'  # the target of all modules of a folder, for what looks them up by name
_HEADER = '# Written by tools/build_files.py from the imports: make build-files.\n'
_ROOT_BUILD = 'exports_files([\n    "pyproject.toml",\n    "requirements/lock.txt",\n])\n'


def label_of(path: pathlib.Path) -> str:
  """The target of a file: //peftlab/fuse:weights for weights.py, //peftlab/fuse for __init__.py."""
  folder = path.parent
  name = folder.name if path.name == '__init__.py' else path.stem
  return f'//{folder}' if name == folder.name else f'//{folder}:{name}'


def _in_package(label: str, folder: pathlib.Path) -> str:
  """The shortest form of `label` inside the package `folder`."""
  package, _, name = label.partition(':')
  if package != f'//{folder}':
    return label
  return f':{name or folder.name}'


def _sort_key(label: str) -> tuple:
  """buildifier's own order of labels."""
  return (not label.startswith(':'), label.replace(':', '.').split('.'), label)


class Targets:
  """The files of the checkout, what each imports, and the labels of both."""

  def __init__(self, root: pathlib.Path = imports.ROOT):
    self.root = root
    self.graph = imports.graph(*FOLDERS, root=root)
    self.paths = {imports.module_of(path): path for path in self.graph}
    with open(root / 'tools' / 'build_extras.toml', 'rb') as file:
      self.extras: dict[str, dict[str, Any]] = tomllib.load(file)
    if unknown := sorted(name for name in self.extras if not (root / name).exists()):
      raise ValueError(f'tools/build_extras.toml: no such file or folder: {", ".join(unknown)}.')

  def extra(self, path: pathlib.Path, key: str) -> list[str]:
    """What the table says of a file; of a test, also what it says of the folders above it."""
    above = path.parents if path.name.endswith('_test.py') else ()
    tables = (self.extras.get(str(place), {}) for place in (path, *above))
    return [item for table in tables for item in table.get(key, ())]

  def modules(self, path: pathlib.Path) -> set[str]:
    """The modules of this checkout that `path` needs, itself left out.

    Raises:
      ValueError: it imports a module of ours that does not exist.
    """
    return (self._imported(path) | self._named_at_run_time(path)) - {imports.module_of(path)}

  def _imported(self, path: pathlib.Path) -> set[str]:
    names = set()
    for line in self.graph[path]:
      if line.target.split('.')[0] in _OURS:
        if line.target not in self.paths:
          raise ValueError(f'{path}:{line.line}: imports {line.target}, which does not exist.')
        names.add(line.target)
    return names

  def _named_at_run_time(self, path: pathlib.Path) -> set[str]:
    found = set()
    for name in self.extra(path, 'deps'):
      package, star, _ = name.partition('*')
      inner = {n for n in self.paths if n.startswith(package) and '.' not in n[len(package) :]}
      if not (inner if star else name in self.paths):
        raise ValueError(f'tools/build_extras.toml: {path} needs {name}, which does not exist.')
      found |= inner if star else {name}
    return found

  def check_cycles(self) -> None:
    """Raises ValueError naming the first cycle of imports."""
    edges = {name: self.modules(path) for name, path in self.paths.items()}
    if found := imports.cycle(edges):
      raise ValueError(f'The imports go round in a circle: {" -> ".join(found)}.')

  def starred(self) -> dict[pathlib.Path, list[str]]:
    """The folders of which all modules are needed at run time: {folder: their names}."""
    every = {name for table in self.extras.values() for name in table.get('deps', ())}
    found = {}
    for package in (name.removesuffix('.*') for name in every if name.endswith('.*')):
      names = sorted(n for n in self.paths if n.rpartition('.')[0] == package)
      found[self.paths[package].parent] = names
    return found

  def deps(self, path: pathlib.Path) -> list[str]:
    """The labels of what `path` imports, and of the conftest files above a test."""
    named = self.extra(path, 'deps')
    folders = {name.removesuffix('.*') for name in named if name.endswith('.*')}
    names = self._imported(path) | {name for name in named if not name.endswith('.*')}
    found = {label_of(self.paths[name]) for name in names - {imports.module_of(path)}}
    found |= {f'//{self.paths[name].parent}:{_ALL}' for name in folders}
    if path.name.endswith('_test.py'):
      above = (folder / 'conftest.py' for folder in path.parents)
      found |= {label_of(conftest) for conftest in above if conftest in self.graph}
    return sorted((_in_package(label, path.parent) for label in found), key=_sort_key)

  def data(self, path: pathlib.Path) -> list[str]:
    """The files beside a module that its strings name, and goldens, named or imported."""
    strings = list(imports.strings_of((self.root / path).read_text()))
    named = [*strings, *self._imported(path)]
    beside = (self.root / path.parent).iterdir()
    found = {
      item.name
      for item in beside
      if item.suffix in _DATA_SUFFIXES and any(item.name in text for text in strings)
    }
    if path.parts[0] == 'tests' and any('goldens' in text for text in named):
      found.add(_in_package('//tests/goldens:files', path.parent))
    return sorted(found, key=_sort_key)


def _attribute(name: str, value: str | bool | list[str]) -> str:
  if isinstance(value, bool):
    return f'    {name} = {value},\n'
  if isinstance(value, str):
    return f'    {name} = "{value}",\n'
  if len(value) == 1:
    return f'    {name} = ["{value[0]}"],\n'
  rows = ''.join(f'        "{item}",\n' for item in value)
  return f'    {name} = [\n{rows}    ],\n'


def _rule(kind: str, attributes: dict[str, Any]) -> str:
  rows = ''.join(_attribute(name, value) for name, value in attributes.items() if value)
  return f'{kind}(\n{rows})\n'


def _target(targets: Targets, path: pathlib.Path) -> str:
  """The rule for one file."""
  is_test = path.name.endswith('_test.py')
  size = targets.extras.get(str(path), {}).get('size', 'small')
  name = label_of(path)
  attributes = {
    'name': name.rpartition(':')[2] if ':' in name else path.parent.name,
    'size': size if is_test else '',
    'testonly': path.parts[0] == 'tests' and not is_test,
    'srcs': [path.name],
    'data': targets.data(path),
    'tags': ['manual'] if is_test and path.parent == _ON_CHECKOUT else [],
    'deps': targets.deps(path),
  }
  return _rule('peftlab_test' if is_test else 'peftlab_library', attributes)


def _extra_rules(targets: Targets, folder: pathlib.Path) -> str:
  if names := targets.starred().get(folder):
    labels = [_in_package(label_of(targets.paths[name]), folder) for name in names]
    deps = sorted(labels, key=_sort_key)
    return '\n' + _rule('peftlab_library', {'name': _ALL, 'deps': deps})
  if str(folder) == 'tests/goldens':
    return (
      '\nfilegroup(\n    name = "files",\n    testonly = True,\n    srcs = glob(\n'
      '        ["**"],\n        exclude = ["*.py"],\n    ),\n'
      '    visibility = ["//tests:__subpackages__"],\n)\n'
    )
  return '\nexports_files(["pytest_main.py"])\n' if str(folder) == 'tools' else ''


def build_files(root: pathlib.Path = imports.ROOT) -> dict[pathlib.Path, str]:
  """The text of every BUILD file, by its path in the checkout.

  Raises:
    ValueError: an import of a module that does not exist, or a cycle of imports.
  """
  targets = Targets(root)
  targets.check_cycles()
  folders = collections.defaultdict(list)
  for path in targets.graph:
    folders[path.parent].append(path)
  result = {pathlib.Path('BUILD'): _HEADER + '\n' + _ROOT_BUILD}
  for folder, paths in folders.items():
    kinds = {'peftlab_test' if p.name.endswith('_test.py') else 'peftlab_library' for p in paths}
    names = ', '.join(f'"{kind}"' for kind in sorted(kinds))
    rules = '\n'.join(_target(targets, path) for path in sorted(paths))
    text = f'{_HEADER}load("//:defs.bzl", {names})\n\n{rules}{_extra_rules(targets, folder)}'
    result[folder / 'BUILD'] = text
  return result


def existing(root: pathlib.Path = imports.ROOT) -> set[pathlib.Path]:
  """The BUILD files that are there."""
  found = {path.relative_to(root) for top in FOLDERS for path in (root / top).rglob('BUILD')}
  linked = (root / 'peftlab' / name for name in ('plugins', 'experiments', 'third_party'))
  for folder in linked:
    stubs = folder / 'bazel_stubs'
    found |= {p.relative_to(root) for p in folder.rglob('BUILD') if stubs not in p.parents}
  return found | ({pathlib.Path('BUILD')} if (root / 'BUILD').exists() else set())


def differences(root: pathlib.Path = imports.ROOT) -> dict[pathlib.Path, str | None]:
  """The BUILD files that are not as they would be, with the right text (None: to be removed)."""
  wanted = build_files(root)
  there = existing(root)
  wrong: dict[pathlib.Path, str | None] = dict.fromkeys(there - set(wanted))
  return wrong | {
    path: text
    for path, text in wanted.items()
    if path not in there or (root / path).read_text() != text
  }


def main() -> None:
  """Writes or checks the BUILD files of this checkout."""
  parser = argparse.ArgumentParser(description=main.__doc__)
  parser.add_argument('--check', action='store_true', help='write nothing; exit 1 if any differs')
  arguments = parser.parse_args()
  try:
    wrong = differences()
  except ValueError as error:
    sys.exit(str(error))
  if arguments.check:
    if wrong:
      sys.exit(f'Run `make build-files`; not up to date: {", ".join(map(str, sorted(wrong)))}.')
    return
  for path, text in wrong.items():
    if text is None:
      (imports.ROOT / path).unlink()
    else:
      (imports.ROOT / path).write_text(text)


if __name__ == '__main__':
  main()

"""Reads which modules of this checkout import which, from the source alone."""

import ast
from collections.abc import Iterator
import dataclasses
import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
_IMPORT_LINE = re.compile(r'^(import|from) [\w.]+( import .*)?$', re.MULTILINE)
_SKIPPED = {'__pycache__', 'bazel_stubs'}


@dataclasses.dataclass(frozen=True, order=True)
class Import:
  """One imported module: `target` as written, resolved to the longest module that exists here."""

  line: int
  target: str


def python_files(*folders: str, root: pathlib.Path = ROOT) -> list[pathlib.Path]:
  """Every .py file under the folders of `root`, through links, as sorted relative paths."""
  found = []
  for folder in folders:
    for where, inner, names in os.walk(root / folder, followlinks=True):
      inner[:] = sorted(set(inner) - _SKIPPED)
      found += [pathlib.Path(where, name) for name in names if name.endswith('.py')]
  return sorted(path.relative_to(root) for path in found)


def module_of(path: pathlib.Path) -> str:
  """The name of a file of the checkout: peftlab/fuse/__init__.py -> peftlab.fuse."""
  parts = path.with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def imports_of(source: str, known: frozenset[str]) -> list[Import]:
  """Every import statement's modules, those inside functions and `if TYPE_CHECKING` included.

  So are those of a program that a test hands to another process: a string of a few lines.

  Args:
    source: the text of a module. Relative imports are not used in this project.
    known: names of the modules that exist here; `from a import b` means `a.b` where that is one.
  """
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found |= {Import(node.lineno, alias.name) for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
      for alias in node.names:
        inner = f'{node.module}.{alias.name}'
        found.add(Import(node.lineno, inner if inner in known else node.module))
  for text in strings_of(source):
    found |= {Import(1, inner.target) for inner in _imports_of_program(text, known)}
  return sorted(found)


def _imports_of_program(text: str, known: frozenset[str]) -> list[Import]:
  if text.count('\n') < 3 or not _IMPORT_LINE.search(text):
    return []
  try:
    return imports_of(text, known)
  except SyntaxError:
    return []  # a text that only looks like a program


def graph(*folders: str, root: pathlib.Path = ROOT) -> dict[pathlib.Path, list[Import]]:
  """The imports of every file under `folders`; modules of peftlab, tests and tools are known."""
  known = frozenset(map(module_of, python_files('peftlab', 'tests', 'tools', root=root)))
  files = python_files(*folders, root=root)
  return {path: imports_of((root / path).read_text(), known) for path in files}


def cycle(edges: dict[str, set[str]]) -> list[str]:
  """The names along one cycle of `edges`, the first repeated at the end; [] where there is none."""
  done: set[str] = set()
  for start in sorted(edges):
    trail: list[str] = []
    if found := _walk(start, edges, trail, done):
      return found
  return []


def _walk(name: str, edges: dict[str, set[str]], trail: list[str], done: set[str]) -> list[str]:
  if name in trail:
    return [*trail[trail.index(name) :], name]
  if name in done:
    return []
  trail.append(name)
  for inner in sorted(edges.get(name, ())):
    if found := _walk(inner, edges, trail, done):
      return found
  done.add(trail.pop())
  return []


def strings_of(source: str) -> Iterator[str]:
  """Every string constant of a module that is not a docstring or another bare statement."""
  tree = ast.parse(source)
  bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
      yield node.value

"""Files and functions stay short enough to be read at once."""

import ast
import pathlib

from tools import imports

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_SHIM = 150

FILES = imports.python_files('peftlab', 'tests', 'tools', 'benchmarks')


def test_files_are_short():
  sizes = {str(path): len((imports.ROOT / path).read_text().splitlines()) for path in FILES}
  assert {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FILE} == {}


def test_functions_are_short():
  sizes = {
    f'{path}:{node.lineno} {node.name}': node.end_lineno - node.lineno + 1
    for path in FILES
    for node in ast.walk(ast.parse((imports.ROOT / path).read_text()))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
  }
  assert {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FUNCTION} == {}


def test_a_shim_is_short_and_says_whose_it_is():
  shims = {path.parent for path in FILES if path.parts[:2] == ('peftlab', 'third_party')}
  for shim in shims - {pathlib.Path('peftlab/third_party')}:
    lines = sum(len(file.read_text().splitlines()) for file in (imports.ROOT / shim).glob('*.py'))
    assert lines <= MOST_LINES_OF_A_SHIM, shim
    names = {file.name for file in (imports.ROOT / shim).iterdir()}
    assert {'README.md', 'LICENSE', 'METADATA', 'BUILD'} <= names, shim

"""The order in which the parts of peftlab may use one another, read from their imports."""

import pytest

from tools import imports

# A row may import itself and the rows above it.
ROWS = (
  '_registry',
  '_processes',
  '_parts',
  '_slot',
  '_batch',
  '_base',
  '_adapter',
  '_claims',
  '_groups',
  '_packed',
  '_kernel',
  '_points',
  '_flax_layers',
  '_specs',
  '_chunks',
  '_padded',
  '_layer',
  '_rows',
  '_stack',
  '_sites',
  '_linearity',
  '_plan',
  '_initial',
  '_report',
  '_attach',
  '_moments',
  'quant',
  'appliers',
  'formats',  # files of weights: the models and the data are read from them
  '_plugin_file',
  'models',
  'data',
  'serve',
  'train',
  'fuse',
  'sweep',
  'plan',
  'testing',
  'cli',
  '__main__',
)
OUTSIDE = ('plugins', 'experiments', 'third_party')


def row_of(module: str) -> str:
  """'peftlab.fuse.weights' -> 'fuse'; '' for peftlab itself."""
  return [*module.split('.'), ''][1]


def framework() -> dict:
  """The imports of peftlab without the folders that only users import."""
  found = imports.graph('peftlab')
  return {path: rows for path, rows in found.items() if path.parts[1] not in OUTSIDE}


def test_every_file_of_the_framework_has_a_row():
  rows = {row_of(imports.module_of(path)) for path in framework()} - {''}
  assert rows <= set(ROWS), f'not in ROWS: {sorted(rows - set(ROWS))}'


def test_a_row_imports_itself_and_rows_above_it():
  wrong = []
  for path, found in framework().items():
    row = row_of(imports.module_of(path))
    for line in found:
      if not row or line.target.split('.')[0] != 'peftlab' or row_of(line.target) in OUTSIDE:
        continue
      inner = row_of(line.target)
      if inner not in ROWS or ROWS.index(inner) > ROWS.index(row):
        wrong.append(f'{path}:{line.line}: {row} imports {line.target}, which is not above it')
  assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('name', ('plugins', 'experiments', 'tests', 'tools'))
def test_the_framework_does_not_import(name):
  wrong = [
    f'{path}:{line.line}: imports {line.target}'
    for path, found in framework().items()
    for line in found
    if f'{line.target}.'.startswith((f'peftlab.{name}.', f'{name}.'))
  ]
  assert not wrong, '\n'.join(wrong)


def test_only_third_party_imports_private_modules():
  wrong = [
    f'{path}:{line.line}: imports {line.target}'
    for path, found in imports.graph('peftlab', 'tests', 'tools', 'benchmarks').items()
    for line in found
    if '_src' in line.target.split('.') and path.parts[:2] != ('peftlab', 'third_party')
  ]
  assert not wrong, '\n'.join(wrong)


def test_no_module_has_two_names():
  wrong = [
    f'{path}:{line.line}: imports {line.target}; write peftlab.{line.target}'
    for path, found in imports.graph('peftlab', 'tests', 'tools', 'benchmarks').items()
    for line in found
    if line.target.split('.')[0] in OUTSIDE
  ]
  assert not wrong, '\n'.join(wrong)


def test_no_import_is_relative():
  wrong = [
    str(path)
    for path in imports.python_files('peftlab', 'tests', 'tools', 'benchmarks')
    if any(
      line.lstrip().startswith('from .') for line in (imports.ROOT / path).read_text().splitlines()
    )
  ]
  assert not wrong


def test_a_cycle_is_found():
  assert imports.cycle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c', 'b']
  assert imports.cycle({'a': {'b', 'c'}, 'b': {'c'}, 'c': set()}) == []


def test_imports_inside_functions_are_seen():
  source = 'import a.b\ndef f():\n  from peftlab import fuse, Adapter\n'
  found = imports.imports_of(source, frozenset({'peftlab', 'peftlab.fuse'}))
  assert [line.target for line in found] == ['a.b', 'peftlab', 'peftlab.fuse']


def test_imports_of_programs_in_strings_are_seen():
  source = (
    'run("""\\nimport a\\nfrom peftlab import fuse\\nfuse.f()\\n""")\ntext = "from here on"\n'
  )
  found = imports.imports_of(source, frozenset({'peftlab', 'peftlab.fuse'}))
  assert [line.target for line in found] == ['a', 'peftlab.fuse']

"""The code in docs/ runs, its commands and flags exist, and its design is that of the code."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

import peftlab
from peftlab import cli, testing
from peftlab.cli import (
  _flags,
  _plugins,
  check,
  convert,
  demo,
  export,
  generate,
  merge,
  plan,
  sweep,
  train,
)
from tests.project import import_order_test
from tools import imports

DOCS = imports.ROOT / 'docs'
PAGES = ['../README.md', *sorted(path.name for path in DOCS.glob('*.md'))]
# What the commands of a page may begin with; no test installs or trains for them.
OTHER_COMMANDS = ('make', 'pip install .', "pip install '.[")
WITH_EXPERIMENT = {'plan': plan._define, 'sweep': sweep._define, 'train': train._define}
PLAIN = {'check': check, 'convert': convert, 'demo': demo, 'export': export}
DEFINITIONS = {n: m._define for n, m in (PLAIN | {'generate': generate, 'merge': merge}).items()}

RUN = (sys.executable, '-W', 'error', 'page.py')
LIST_ADAPTERS = (sys.executable, '-c', 'import peftlab; print(*peftlab.adapter_types())')


def blocks(page: str, language: str) -> list[str]:
  """The fenced blocks of a page in one language."""
  text = (DOCS / page).read_text(encoding='utf-8')
  return re.findall(rf'^```{language}\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL)


def write_files(page: str, folder: pathlib.Path) -> list[str]:
  """Writes the blocks whose first line is a comment with a file's name; their names."""
  found = []
  for block in blocks(page, 'python'):
    if named := re.match(r'# ([\w/]+\.py)\n', block):
      found.append(named[1])
      (folder / named[1]).parent.mkdir(exist_ok=True)
      (folder / named[1]).write_text(block.removeprefix(named[0]), encoding='utf-8')
  return found


def run(command, folder: pathlib.Path, **variables: str) -> str:
  """What a command says, run in a folder."""
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', **variables}
  done = subprocess.run(
    command, cwd=folder, env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.parametrize('page', PAGES)
def test_python_blocks_run(page, tmp_path):
  code = [b for b in blocks(page, 'python') if not b.startswith('# experiments/')]
  if not code:
    pytest.skip('no python in it')
  (tmp_path / 'page.py').write_text('\n'.join(code), encoding='utf-8')
  run(RUN, tmp_path)


def commands(page: str) -> list[str]:
  return [line for block in blocks(page, 'sh') for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize('page', PAGES)
def test_commands_and_flags_exist(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'experiments').mkdir()
  for experiment in (imports.ROOT / 'experiments').glob('*.py'):
    (tmp_path / 'experiments' / experiment.name).write_text(experiment.read_text())
  write_files('adding_an_adapter.md', tmp_path)
  peftlab.load_plugin('my_ia3.py')
  write_files(page, tmp_path)
  try:
    for line in commands(page):
      _check_command(line)
  finally:
    for name in [n for n in sys.modules if n.startswith('peftlab.experiments.my_')]:
      del sys.modules[name]


def _check_command(line: str) -> None:
  if line.startswith(OTHER_COMMANDS):
    return
  program, name, *rest = shlex.split(line)
  assert program == 'peftlab', line
  assert name in cli.subcommands(), line
  if '--help' in rest:
    return
  rest = _plugins.load(rest)
  if name in WITH_EXPERIMENT and (name != 'sweep' or _flags.source(rest)):
    _flags.parse(rest, WITH_EXPERIMENT[name])
    return
  file, rest = (rest[:1], rest[1:]) if name == 'check' else ([], rest)
  places = (pathlib.Path(), imports.ROOT)
  assert all(any((at / path).is_file() for at in places) for path in file), line
  _flags.parse_plain(rest, DEFINITIONS.get(name, WITH_EXPERIMENT.get(name, lambda values: None)))


def test_the_adapter_of_the_page_passes_the_suite(tmp_path, capsys):
  write_files('adding_an_adapter.md', tmp_path)
  with testing.quick_compiles():
    code = cli.main(['check', str(tmp_path / 'my_ia3.py')])
  assert code == 0, capsys.readouterr().out


def test_the_package_of_the_page_is_found_by_its_entry_point(tmp_path):
  (block,) = blocks('adding_an_adapter.md', 'toml')
  project = tomllib.loads(block)
  package = tmp_path / 'my_adapters'
  package.mkdir()
  write_files('adding_an_adapter.md', package)
  (package / '__init__.py').touch()
  information = tmp_path / 'my_adapters-0.1.0.dist-info'
  information.mkdir()
  head = f'Metadata-Version: 2.1\nName: {project["project"]["name"]}\nVersion: 0.1.0\n'
  (information / 'METADATA').write_text(head)
  ((group, points),) = project['project']['entry-points'].items()
  rows = [f'{name} = {where}' for name, where in points.items()]
  (information / 'entry_points.txt').write_text('\n'.join([f'[{group}]', *rows]))
  assert 'my_ia3' in run(LIST_ADAPTERS, tmp_path, PYTHONPATH=str(tmp_path)).split()


def test_the_design_names_every_part_in_the_order_of_imports():
  house = next(b for b in blocks('design.md', 'text') if b.startswith('peftlab/'))
  named = re.findall(r'^  (\w+)/? ', house, flags=re.MULTILINE)
  held = {import_order_test.row_of(imports.module_of(p)) for p in import_order_test.framework()}
  assert named == [row for row in import_order_test.ROWS if row in held - {'', '__main__'}]


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_somewhere(page):
  text = (DOCS / page).read_text(encoding='utf-8')
  for target in re.findall(r'\]\(([^)#]+)\)', text):
    assert target.startswith('https://') or (DOCS / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize('page', PAGES)
def test_files_it_names_exist(page):
  text = (DOCS / page).read_text(encoding='utf-8')
  named = re.findall(r'`((?:peftlab|plugins|tests|experiments|tools)/[\w/]+\.\w+)`', text)
  wrong = [n for n in named if not (imports.ROOT / n).exists() and '/my_' not in n]
  assert not wrong


def test_the_adapter_table_of_the_readme_is_what_the_command_prints(tmp_path):
  printed = run((sys.executable, '-m', 'peftlab', 'adapters'), tmp_path)
  assert printed in blocks('../README.md', 'text')

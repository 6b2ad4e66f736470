"""Whatever is given wrongly is answered by one line and exit code 2, and leaves no trace."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from peftlab import cli
from tests import bad_files as make
from tests.bad_input_cases import CASES, HELD, TRAIN


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> pathlib.Path:
  """A folder with good files, a finished run in run/ and its adapter in adapter/."""
  folder = tmp_path_factory.mktemp('good')
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    make.write_good_files()
    assert cli.main(shlex.split(TRAIN)) == 0
    shutil.copytree('run/adapter', 'adapter')
  return folder


def tree(folder: pathlib.Path) -> dict[str, bytes | None]:
  """Every file and folder below a folder, with what is in it."""
  return {
    str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
    for path in sorted(folder.rglob('*'))
    if '__pycache__' not in path.parts
  }


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> pathlib.Path:
  """The current folder, with good files in it."""
  shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
  monkeypatch.chdir(tmp_path)
  yield tmp_path
  while HELD:
    os.close(HELD.pop())


def prepare(name: str) -> tuple[list[str], dict[str, bytes | None]]:
  """Spoils the files of a case; its arguments, and the files as they then are."""
  case = CASES[name]
  if not name.startswith(('runs', 'adapters')):
    shutil.rmtree('run')
  case.before()
  return shlex.split(case.command), tree(pathlib.Path())


def check(name: str, code: int, said: str, before: dict[str, bytes | None]) -> None:
  assert code == 2, said
  lines = said.splitlines()
  assert len(lines) == 1, said
  assert lines[0].startswith('peftlab: '), said
  assert lines[0].endswith(('.', '?')), said
  assert CASES[name].said in lines[0], said
  after = tree(pathlib.Path())
  assert sorted(after) == sorted(before)
  assert [n for n in after if after[n] != before[n]] == []


def test_there_are_enough_cases():
  assert len(CASES) >= 40


@pytest.mark.parametrize('name', CASES)
@pytest.mark.usefixtures('here')
def test_bad_input(name, capfd):
  arguments, before = prepare(name)
  code = cli.main(arguments)
  check(name, code, capfd.readouterr().err, before)


@pytest.mark.parametrize(
  'name',
  (
    'flags: field',
    'fields: where',
    'data: json',
    'runs: checkpoint changed',
    'adapters: tensors cut',
  ),
)
@pytest.mark.usefixtures('here')
def test_bad_input_to_the_command(name):
  arguments, before = prepare(name)
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(
    [sys.executable, '-m', 'peftlab', *arguments],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  check(name, done.returncode, done.stderr, before)

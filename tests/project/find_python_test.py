"""tools/find_python.sh finds a Python 3.12 or newer, or says in one line what is missing."""

import pathlib
import subprocess
import sys

import pytest

from tools import imports

SCRIPT = imports.ROOT / 'tools' / 'find_python.sh'
REAL = sys.executable


@pytest.fixture
def machine(tmp_path):
  """A machine with nothing but the few commands that the script needs."""
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'home').mkdir()
  return tmp_path


def place(path: pathlib.Path, *, version: tuple[int, int] = (3, 13), missing: str = '') -> None:
  """Puts a Python at `path` that says it is `version` and cannot import `missing`."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [f'import sys; sys.version_info = {(*version, 0)}; sys.executable = {str(path)!r}']
  if missing:
    lines.append(f'sys.modules[{missing!r}] = None')
  (path.parent / 'start.py').write_text('\n'.join([*lines, 'exec(sys.argv[1])']))
  path.write_text(f'#!/bin/sh\nexec {REAL} -S "{path.parent}/start.py" "$2"\n')
  path.chmod(0o755)


def find(machine: pathlib.Path, **environment: str) -> subprocess.CompletedProcess[str]:
  variables = {'PATH': str(machine / 'bin'), 'HOME': str(machine / 'home'), **environment}
  return subprocess.run(
    ['/bin/sh', SCRIPT], env=variables, capture_output=True, text=True, check=False
  )


@pytest.mark.parametrize('name', ('python3.13', 'python3.12', 'python3', 'python'))
def test_finds_python_on_path(machine, name):
  place(machine / 'bin' / name)
  assert find(machine).stdout.strip() == str(machine / 'bin' / name)


def test_passes_over_an_old_python3(machine):
  place(machine / 'bin' / 'python3', version=(3, 11))
  place(machine / 'home/.pyenv/versions/3.12.9/bin/python', version=(3, 12))
  assert '3.12.9' in find(machine).stdout


def test_passes_over_a_command_that_only_fails(machine):
  shim = machine / 'bin' / 'python3.13'
  shim.write_text('#!/bin/sh\necho "command not found" >&2; exit 127\n')
  shim.chmod(0o755)
  place(machine / 'bin' / 'python3.12', version=(3, 12))
  assert find(machine).stdout.strip().endswith('python3.12')


def test_finds_pyenv_by_its_variable(machine):
  place(machine / 'elsewhere/versions/3.13.1/bin/python')
  found = find(machine, PYENV_ROOT=str(machine / 'elsewhere'))
  assert found.stdout.strip() == str(machine / 'elsewhere/versions/3.13.1/bin/python')


def test_finds_python_by_uv(machine):
  place(machine / 'uv' / 'python')
  uv = machine / 'bin' / 'uv'
  uv.write_text(f'#!/bin/sh\n[ "$1 $2" = "python find" ] && echo {machine}/uv/python\n')
  uv.chmod(0o755)
  assert find(machine).stdout.strip() == str(machine / 'uv' / 'python')


def test_lets_uv_install_python(machine):
  place(machine / 'uv' / 'python')
  uv = machine / 'bin' / 'uv'
  uv.write_text(
    f'#!/bin/sh\ncase "$1 $2" in\n'
    f'"python install") : >{machine}/installed ;;\n'
    f'"python find") [ -e {machine}/installed ] && echo {machine}/uv/python ;;\nesac\n'
  )
  uv.chmod(0o755)
  assert find(machine).stdout.strip() == str(machine / 'uv' / 'python')


def test_takes_the_python_asked_for(machine):
  place(machine / 'bin' / 'python3.13')
  place(machine / 'mine', version=(3, 12))
  assert find(machine, PYTHON=str(machine / 'mine')).stdout.strip() == str(machine / 'mine')


@pytest.mark.parametrize(
  ('placed', 'environment', 'said'),
  (
    ({}, {}, 'Python 3.12 or newer was not found'),
    ({'version': (3, 11)}, {}, 'Python 3.12 or newer was not found'),
    ({'missing': 'ensurepip'}, {}, 'lacks the modules venv and ensurepip'),
    ({}, {'PYTHON': '/none'}, "PYTHON is '/none', which is not a Python 3.12"),
  ),
)
def test_says_in_one_line_what_is_missing(machine, placed, environment, said):
  if placed:
    place(machine / 'bin' / 'python3', **placed)
  found = find(machine, **environment)
  assert found.returncode == 1
  assert found.stdout == ''
  assert len(found.stderr.splitlines()) == 1
  assert said in found.stderr

"""tools/venv.sh installs once for each content of the requirement files."""

import importlib.metadata
import pathlib
import shutil
import subprocess
import tomllib

from packaging import requirements, utils
import pytest

from tools import imports


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
  """A checkout whose .venv/bin/python writes down its arguments and installs nothing."""
  for name in ('tools/venv.sh', 'requirements/lock.txt', 'pyproject.toml'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(imports.ROOT / name, tmp_path / name)
  python = tmp_path / '.venv/bin/python'
  python.parent.mkdir(parents=True)
  python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ "$1" != -c ] || echo 3.13.0\n')
  python.chmod(0o755)
  return tmp_path


def make_venv(checkout: pathlib.Path) -> list[str]:
  """Runs the script; the pip installs that it asked for."""
  (checkout / 'calls').write_text('')
  subprocess.run(['sh', checkout / 'tools/venv.sh', '.venv'], check=True, capture_output=True)
  return [call for call in (checkout / 'calls').read_text().splitlines() if ' install ' in call]


def test_installs_the_pins_and_the_checkout_without_dependencies(checkout):
  first, second = make_venv(checkout)
  assert '--no-deps --requirement requirements/lock.txt' in first
  assert '--no-deps --no-build-isolation --editable .' in second


def test_a_second_run_installs_nothing(checkout):
  make_venv(checkout)
  assert make_venv(checkout) == []


@pytest.mark.parametrize('name', ('requirements/lock.txt', 'pyproject.toml'))
def test_a_change_of_requirements_installs_again(checkout, name):
  make_venv(checkout)
  with open(checkout / name, 'a') as file:
    file.write('# changed\n')
  assert make_venv(checkout) != []


def test_a_failed_install_is_not_taken_for_done(checkout):
  python = checkout / '.venv/bin/python'
  works = python.read_text()
  python.write_text(works + 'case "$*" in *install*) exit 1 ;; esac\n')
  with pytest.raises(subprocess.CalledProcessError):
    make_venv(checkout)
  python.write_text(works)
  assert make_venv(checkout) != []


def test_a_venv_that_does_not_work_is_named_and_left_alone(checkout):
  python = checkout / '.venv/bin/python'
  python.unlink()
  result = subprocess.run(
    ['sh', checkout / 'tools/venv.sh', '.venv'], capture_output=True, text=True, check=False
  )
  assert result.returncode == 1
  assert result.stderr.startswith("The virtual environment '.venv' has no working Python 3.12")
  assert (checkout / '.venv').exists()


def pins(name: str) -> dict[str, str]:
  """{package: version} of a requirements file."""
  lines = (imports.ROOT / 'requirements' / name).read_text().splitlines()
  rows = [line.split('==') for line in lines if not line.startswith('#')]
  assert len(dict(rows)) == len(rows)
  return {utils.canonicalize_name(package): version for package, version in rows}


def test_the_lock_holds_all_that_its_packages_need():
  project = tomllib.loads((imports.ROOT / 'pyproject.toml').read_text())['project']
  asked = [*project['dependencies'], *project['optional-dependencies']['dev']]
  locked = pins('lock.txt')
  for package in locked:
    asked += importlib.metadata.requires(package) or ()
  for line in asked:
    wanted = requirements.Requirement(line)
    if wanted.marker is None or wanted.marker.evaluate({'extra': ''}):
      version = locked[utils.canonicalize_name(wanted.name)]
      assert wanted.specifier.contains(version, prereleases=True), line


def test_the_data_packages_are_installed_at_their_versions():
  for package, version in pins('data.txt').items():
    assert importlib.metadata.version(package) == version


def test_the_tpu_compiler_is_the_one_that_jax_asks_for():
  ((package, version),) = pins('tpu.txt').items()
  asked = map(requirements.Requirement, importlib.metadata.requires('jax') or ())
  (wanted,) = (r for r in asked if r.name == package and r.marker.evaluate({'extra': 'tpu'}))
  assert wanted.specifier.contains(version)

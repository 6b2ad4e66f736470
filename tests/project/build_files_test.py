"""The BUILD files are what the imports say."""

import pathlib

import pytest

from tools import build_files


def write(root: pathlib.Path, files: dict[str, str]) -> None:
  for name, text in {'tools/build_extras.toml': '', **files}.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_the_build_files_of_this_checkout_are_up_to_date():
  assert sorted(map(str, build_files.differences())) == []


def test_a_target_has_the_imports_as_its_deps(tmp_path):
  write(
    tmp_path,
    {
      'peftlab/__init__.py': 'from peftlab import _parts\n',
      'peftlab/_parts.py': 'import jax\n',
      'peftlab/fuse/__init__.py': '',
      'peftlab/fuse/weights.py': 'def f():\n  from peftlab import _parts, fuse\n',
      'tests/conftest.py': '',
      'tests/fuse/weights_test.py': 'from peftlab.fuse import weights\nA = "goldens/a.npz"\n',
    },
  )
  files = {str(path): text for path, text in build_files.build_files(tmp_path).items()}
  assert (
    'name = "peftlab",\n    srcs = ["__init__.py"],\n    deps = [":_parts"],'
    in files['peftlab/BUILD']
  )
  assert (
    'deps = [\n        ":fuse",\n        "//peftlab:_parts",\n    ],' in files['peftlab/fuse/BUILD']
  )
  assert files['tests/fuse/BUILD'].endswith(
    'peftlab_test(\n    name = "weights_test",\n    size = "small",\n'
    '    srcs = ["weights_test.py"],\n    data = ["//tests/goldens:files"],\n'
    '    deps = [\n        "//peftlab/fuse:weights",\n        "//tests:conftest",\n    ],\n)\n'
  )


def test_an_import_of_nothing_is_named(tmp_path):
  write(tmp_path, {'peftlab/__init__.py': 'import peftlab.fuze\n'})
  with pytest.raises(ValueError, match=r'peftlab/__init__.py:1: imports peftlab.fuze, which does'):
    build_files.build_files(tmp_path)


def test_a_cycle_is_named(tmp_path):
  write(
    tmp_path,
    {
      'peftlab/__init__.py': 'from peftlab import a\n',
      'peftlab/a.py': 'def f():\n  import peftlab\n',
    },
  )
  with pytest.raises(ValueError, match=r'peftlab -> peftlab\.a -> peftlab'):
    build_files.build_files(tmp_path)


def test_a_stale_or_needless_build_file_is_found(tmp_path):
  write(tmp_path, {'peftlab/__init__.py': '', 'peftlab/old/BUILD': 'x', 'BUILD': 'y'})
  wrong = build_files.differences(tmp_path)
  assert wrong[pathlib.Path('peftlab/old/BUILD')] is None
  assert 'pyproject.toml' in wrong[pathlib.Path('BUILD')]

"""Files inside packages."""

import importlib.metadata

import pytest

from peftlab.formats.packages import VERSIONS, package_file


@pytest.mark.parametrize('package', VERSIONS)
def test_the_named_version_is_the_one_that_is_installed(package):
  assert importlib.metadata.version(package) == VERSIONS[package]


def test_a_missing_package_or_file_is_one_line_with_the_command():
  with pytest.raises(
    ValueError, match=r"'nothing-like-it' is not installed\. Run: pip install --no"
  ):
    package_file('nothing-like-it', 'a')
  with pytest.raises(ValueError, match=r"'glassllm' 0\.1\.0 has no file 'glassllm/x\.npz'\. Run: "):
    package_file('glassllm', 'glassllm/x.npz')

"""Runs the test file given, for a bazel test: pytest with the project's own settings."""

import sys

import pytest


def hide_checkout() -> None:
  """Takes an editable install off the import path: only declared dependencies are found."""
  sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, '__module__', '').startswith('__editable__')
  ]


if __name__ == '__main__':
  hide_checkout()
  sys.exit(pytest.main(['-c', 'pyproject.toml', '-p', 'no:cacheprovider', *sys.argv[1:]]))

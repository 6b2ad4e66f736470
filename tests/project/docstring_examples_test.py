"""The examples in docstrings give what they say."""

import doctest
import importlib

import pytest

from tools import imports

EXAMPLES = [
  imports.module_of(path)
  for path in imports.python_files('peftlab')
  if '>>> ' in (imports.ROOT / path).read_text()
]


@pytest.mark.parametrize('name', EXAMPLES)
def test_docstring_examples(name):
  result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
  assert result.attempted
  assert not result.failed

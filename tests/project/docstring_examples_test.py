"""The examples in docstrings give what they say."""

import doctest
import importlib

from tools import imports


def test_docstring_examples():
  for path in imports.python_files('peftlab'):
    if '>>> ' in (imports.ROOT / path).read_text():
      module = importlib.import_module(imports.module_of(path))
      result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
      assert result.attempted, f'{path}: the example is in no docstring'
      assert not result.failed, path

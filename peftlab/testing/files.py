"""Properties of an adapter on disk: what is written, and what comes back in any layout."""

from __future__ import annotations

import pathlib
import tempfile

import jax
from safetensors import numpy as safetensors

from peftlab import _parts, _registry
from peftlab.formats import adapter_folder
from peftlab.testing import case as cases


def comes_back_from_disk(case: cases.Case) -> None:
  """Saved and loaded it is bitwise what it was, in the stack and in a list of the same layers."""
  kind = type(case.adapter)
  if kind not in [_registry.adapters.get(name) for name in _registry.adapters.names()]:
    raise cases.NotApplicable('it is not registered under a name')
  written = _parts.flat(case.random.adapter)
  with tempfile.TemporaryDirectory() as folder:
    directory = pathlib.Path(folder, 'adapter')
    adapter_folder.save_adapter(_parts.merge(case.random), directory)
    tensors = safetensors.load_file(directory / adapter_folder.TENSORS)
    again = adapter_folder.load_adapter(case.base_model(), directory, name='again')
    listed = adapter_folder.load_adapter(case.list_model(), directory)
  held = sum(tensor.nbytes for tensor in tensors.values())
  own = sum(a.size * _parts.bits(a.dtype) // 8 for a in jax.tree.leaves(case.random.adapter))
  assert 0 < held <= own, f'the file holds {held} bytes of arrays, the adapter has {own}'
  read = _parts.split(again)
  assert read.graph == case.random.graph, 'the graph is another'
  for path, array in written.items():
    name = _parts.path_name(path)
    cases.assert_equal(_parts.flat(read.adapter)[path], array, f'{name} from disk')
  for path, array in _parts.flat(_parts.split(listed).adapter).items():
    stacked = case.in_stack(path, written[cases.list_path(path)])
    cases.assert_equal(array, stacked, f'{_parts.path_name(path)} in a list of layers')


CLAIMS = (comes_back_from_disk,)

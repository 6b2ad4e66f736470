"""The weights and the config of an HF model folder, one file or sharded, read lazily per tensor."""

from collections.abc import Iterator, Mapping
import os
import pathlib
from typing import Any

import numpy as np

from peftlab._registry import did_you_mean
from peftlab.formats import files
from peftlab.formats.safetensors_file import SafetensorsFile, TensorInfo

_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'


class HfWeights(Mapping[str, np.ndarray]):
  """A lazy, read-only mapping over all shards: HF tensor name -> array of the file's own dtype.

  A linear weight is [out, in], an embedding [vocab, embed]. The arrays are views of memory-mapped
  files.

  Attributes:
    directory: the folder.
    config: config.json, parsed.
    tensors: name -> TensorInfo (shape, dtype, place in its file).

  Raises:
    ValueError: the folder is missing; it has no config.json or no safetensors (a pickle such as
      pytorch_model.bin is refused by name); a shard is missing, damaged or lies; the index and the
      shards disagree.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    self.directory = files.existing_folder(directory)
    self._shards = _open_shards(self.directory)
    self.config: dict[str, Any] = files.read_json(self.directory / 'config.json')
    self.tensors: dict[str, TensorInfo] = {
      name: shard.tensors[name] for name, shard in self._shards.items()
    }

  def __getitem__(self, name: str) -> np.ndarray:
    return self._shard(name)[name]

  def info(self, name: str) -> TensorInfo:
    """Shape, dtype and place of `name`; ValueError with the nearest name where it is absent."""
    return self._shard(name).info(name)

  def _shard(self, name: str) -> SafetensorsFile:
    if name not in self._shards:
      near = did_you_mean(name, self._shards)
      raise ValueError(
        f"No tensor '{name}' in '{self.directory}'{near or '.'} It holds {len(self)} tensors."
      )
    return self._shards[name]

  def __contains__(self, name: object) -> bool:
    return name in self._shards

  def __iter__(self) -> Iterator[str]:
    return iter(self._shards)

  def __len__(self) -> int:
    return len(self._shards)


def _open_shards(directory: pathlib.Path) -> dict[str, SafetensorsFile]:
  """Tensor name -> the open file that holds it."""
  if (directory / _SINGLE).is_file():
    single = SafetensorsFile(directory / _SINGLE)
    return dict.fromkeys(single, single)
  if (directory / _INDEX).is_file():
    return _open_index(directory / _INDEX)
  pickles = files.pickles_in(directory)
  if pickles:
    files.refuse_pickle(directory / pickles[0])
  loose = sorted(path.name for path in directory.glob('*.safetensors'))
  found = f' It holds {", ".join(loose[:3])} without an index.' if loose else ''
  raise ValueError(f"Folder '{directory}' has no {_SINGLE} and no {_INDEX}.{found}")


def _open_index(index: pathlib.Path) -> dict[str, SafetensorsFile]:
  weight_map = files.read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"Index '{index}' has no weight_map {{tensor: file}}.")
  shards: dict[str, SafetensorsFile] = {}
  for shard in dict.fromkeys(weight_map.values()):
    if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
      raise ValueError(f"Index '{index}' names the file {shard!r}; expected a name in its folder.")
    if not (index.parent / shard).is_file():
      names = [name for name, file in weight_map.items() if file == shard]
      raise ValueError(
        f"Index '{index}' names the file '{shard}', which is missing; {len(names)} tensors are in "
        f"it, '{names[0]}' first."
      )
    shards[shard] = SafetensorsFile(index.parent / shard)
  _check_index(index, weight_map, shards)
  return {name: shards[shard] for name, shard in weight_map.items()}


def _check_index(
  index: pathlib.Path, weight_map: dict[str, str], shards: dict[str, SafetensorsFile]
) -> None:
  for name, shard in weight_map.items():
    if name not in shards[shard]:
      near = did_you_mean(name, shards[shard])
      raise ValueError(f"Index '{index}' says '{name}' is in '{shard}'; it is not{near or '.'}")
  for shard, file in shards.items():
    for name in file:
      if weight_map.get(name) != shard:
        raise ValueError(
          f"Tensor '{name}' of '{file.path}' is not where the index '{index.name}' says "
          f'({weight_map.get(name)!r}).'
        )

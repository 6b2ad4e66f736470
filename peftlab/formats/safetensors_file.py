"""One safetensors file: read lazily, every claim of its header checked; written atomically."""

from collections.abc import Iterator, Mapping
import dataclasses
import json
import math
import mmap
import os
import pathlib
from typing import IO, Any

import ml_dtypes
import numpy as np

from peftlab._registry import did_you_mean
from peftlab.formats import files

# https://github.com/huggingface/safetensors, "Format": 8 bytes of header length, JSON, the buffer.
DTYPES: dict[str, np.dtype] = {
  'F64': np.dtype('<f8'),
  'F32': np.dtype('<f4'),
  'F16': np.dtype('<f2'),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
  'I64': np.dtype('<i8'),
  'I32': np.dtype('<i4'),
  'I16': np.dtype('<i2'),
  'I8': np.dtype('i1'),
  'U64': np.dtype('<u8'),
  'U32': np.dtype('<u4'),
  'U16': np.dtype('<u2'),
  'U8': np.dtype('u1'),
  'BOOL': np.dtype('?'),
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # bytes; the reference implementation has the same limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
  """Where one tensor lies: `start` and `stop` are bytes from the beginning of the file."""

  shape: tuple[int, ...]
  dtype: np.dtype
  start: int
  stop: int


class SafetensorsFile(Mapping[str, np.ndarray]):
  """A lazy, read-only mapping: tensor name -> array of the file's own dtype.

  The arrays are views of the memory-mapped file: nothing is read before it is used, and a copy is
  made only by who needs one.

  Attributes:
    path: the file.
    metadata: the strings stored beside the tensors.
    tensors: name -> TensorInfo, in the order of the file.

  Raises:
    ValueError: the file is missing, a pickle, cut short, or its header is not valid or lies about
      types, shapes or offsets. No memory is taken for what a header only claims.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = files.existing_file(path)
    files.refuse_pickle(self.path)
    size = self.path.stat().st_size
    subject = f"Safetensors file '{self.path}'"
    with self.path.open('rb') as file:
      header, start = _header(file, size, subject)
      self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    self.metadata: dict[str, str] = _metadata(header.pop('__metadata__', {}), subject)
    self.tensors = {
      name: _info(entry, name, start, size, self.path) for name, entry in header.items()
    }
    _check_layout(self.tensors, start, size, subject)

  def __getitem__(self, name: str) -> np.ndarray:
    info = self.info(name)
    count = math.prod(info.shape)
    if not count:
      return np.empty(info.shape, info.dtype)
    return np.frombuffer(self._data, info.dtype, count, info.start).reshape(info.shape)

  def info(self, name: str) -> TensorInfo:
    """Shape, dtype and place of `name`; ValueError with the nearest name where it is absent."""
    if name not in self.tensors:
      near = did_you_mean(name, self.tensors)
      raise ValueError(
        f"No tensor '{name}' in '{self.path}'{near or '.'} It holds {len(self.tensors)} tensors."
      )
    return self.tensors[name]

  def __contains__(self, name: object) -> bool:
    return name in self.tensors

  def __iter__(self) -> Iterator[str]:
    return iter(self.tensors)

  def __len__(self) -> int:
    return len(self.tensors)


def write_safetensors(
  path: str | os.PathLike[str],
  tensors: Mapping[str, np.ndarray],
  *,
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes `tensors` to `path` atomically and checks the result before it takes the name.

  Widest dtypes first, so that every tensor is aligned. A lazy mapping is written without ever
  holding more than one of its tensors.

  Raises:
    ValueError: no folder to write into, a dtype the format has no word for, metadata not strings.
  """
  path = pathlib.Path(path)
  files.existing_folder(path.parent)
  plan = {name: (array.shape, np.dtype(array.dtype)) for name, array in tensors.items()}
  header = _plan_header(plan, _metadata(dict(metadata or {}), f"Safetensors file '{path}'"), path)

  def write(file: IO[bytes]) -> None:
    content = json.dumps(header, ensure_ascii=False, separators=(',', ':')).encode()
    content += b' ' * (-len(content) % 8)
    file.write(len(content).to_bytes(8, 'little'))
    file.write(content)
    for name in header:
      if name != '__metadata__':
        array = np.ascontiguousarray(tensors[name])
        file.write(array.reshape(-1).view(np.uint8).data)

  files.replace_file(path, write, check=lambda written: _check_written(written, plan, path))


def _header(file: IO[bytes], size: int, subject: str) -> tuple[dict[str, Any], int]:
  """The parsed header and where the buffer starts."""
  prefix = file.read(8)
  length = int.from_bytes(prefix, 'little')
  if len(prefix) < 8 or length > min(size - 8, _HEADER_LIMIT):
    raise ValueError(
      f'{subject} has {size} bytes and claims a header of {length}: it is cut short or not '
      'safetensors. Expected 8 bytes of header length, a JSON header, then the tensors.'
    )
  return files.parse_json(file.read(length), subject=f'{subject}: the header'), 8 + length


def _metadata(value: object, subject: str) -> dict[str, str]:
  if not isinstance(value, dict) or not all(
    isinstance(word, str) for pair in value.items() for word in pair
  ):
    raise ValueError(f'{subject} has metadata {value!r:.100}; expected strings by name.')
  return value


def _info(entry: object, name: str, start: int, size: int, path: pathlib.Path) -> TensorInfo:
  subject = f"Tensor '{name}' of '{path}'"
  if not isinstance(entry, dict) or set(entry) != {'dtype', 'shape', 'data_offsets'}:
    raise ValueError(f'{subject} is {entry!r:.100}; expected dtype, shape and data_offsets.')
  dtype, shape, offsets = entry['dtype'], entry['shape'], entry['data_offsets']
  if not isinstance(dtype, str) or dtype not in DTYPES:
    near = did_you_mean(str(dtype), DTYPES)
    raise ValueError(f'{subject} has dtype {dtype!r}{near or "."} Expected: {", ".join(DTYPES)}.')
  if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
    raise ValueError(
      f'{subject} has shape {shape!r:.100} and data_offsets {offsets!r:.100}; expected lists of '
      'whole numbers, two offsets.'
    )
  expected = math.prod(shape) * DTYPES[dtype].itemsize
  if offsets[1] - offsets[0] != expected:
    raise ValueError(
      f'{subject} has shape {tuple(shape)} of {dtype}, which is {expected} bytes; its offsets '
      f'{offsets} hold {offsets[1] - offsets[0]}.'
    )
  if start + offsets[1] > size:
    raise ValueError(
      f'{subject} ends at byte {start + offsets[1]}, the file has {size} bytes: it is cut short.'
    )
  return TensorInfo(
    shape=tuple(shape), dtype=DTYPES[dtype], start=start + offsets[0], stop=start + offsets[1]
  )


def _counts(value: object) -> bool:
  return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_layout(tensors: dict[str, TensorInfo], start: int, size: int, subject: str) -> None:
  """The tensors fill the buffer: no overlap, no hole, nothing behind the last."""
  end, before = start, 'the header'
  for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
    if info.start != end:
      word = 'overlaps' if info.start < end else 'leaves a hole behind'
      raise ValueError(
        f"{subject}: tensor '{name}' starts at byte {info.start} and {word} {before}, which ends "
        f'at {end}.'
      )
    end, before = info.stop, f"tensor '{name}'"
  if end != size:
    raise ValueError(f'{subject} has {size} bytes; its header accounts for {end}.')


def _plan_header(
  plan: dict[str, tuple[tuple[int, ...], np.dtype]], metadata: dict[str, str], path: pathlib.Path
) -> dict[str, Any]:
  header: dict[str, Any] = {'__metadata__': metadata} if metadata else {}
  offset = 0
  for name, (shape, dtype) in sorted(
    plan.items(), key=lambda item: (-item[1][1].itemsize, item[0])
  ):
    word = _WORDS.get(dtype)
    if word is None or name == '__metadata__':
      raise ValueError(
        f"Tensor '{name}' for '{path}' has dtype {dtype}. Expected one of: {', '.join(DTYPES)}."
      )
    stop = offset + math.prod(shape) * dtype.itemsize
    header[name] = {'dtype': word, 'shape': list(shape), 'data_offsets': [offset, stop]}
    offset = stop
  return header


def _check_written(
  written: pathlib.Path, plan: dict[str, tuple[tuple[int, ...], np.dtype]], path: pathlib.Path
) -> None:
  found = {name: (i.shape, i.dtype) for name, i in SafetensorsFile(written).tensors.items()}
  if found != plan:
    raise OSError(f"'{path}' was not written as planned: {len(plan)} tensors, read {len(found)}.")

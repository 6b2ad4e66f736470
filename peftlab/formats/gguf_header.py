"""The header of a GGUF file: metadata and the place of each tensor, every claim checked."""

import dataclasses
import math
import mmap
import struct
from typing import Any

import numpy as np

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: type number -> struct letter.
_SCALARS = {
  0: 'B',
  1: 'b',
  2: 'H',
  3: 'h',
  4: 'I',
  5: 'i',
  6: 'f',
  7: '?',
  10: 'Q',
  11: 'q',
  12: 'd',
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
  """One tensor: `shape` is [out, in] (the reverse of GGUF's own order), `kind` such as 'Q4_1'.

  `start` and `stop` are bytes from the beginning of the file.
  """

  shape: tuple[int, ...]
  kind: str
  start: int
  stop: int


def read_header(data: mmap.mmap, *, path: object) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
  """The metadata and the tensors of a GGUF file.

  Args:
    data: the whole file.
    path: its name, for messages.

  Raises:
    ValueError: wrong magic or version, cut short, an unknown type, a name twice, or a shape or an
      offset that the file cannot hold.
  """
  cursor = _Cursor(data, path)
  tensor_count, pair_count = _counts(cursor)
  metadata: dict[str, Any] = {}
  for number in range(pair_count):
    key = cursor.string(f'the name of metadata entry {number}')
    if key in metadata:
      raise ValueError(f"GGUF file '{path}' has the metadata key '{key}' twice.")
    metadata[key] = _value(cursor, cursor.scalar('I', f"the type of '{key}'"), key)
  entries = [_entry(cursor, number) for number in range(tensor_count)]
  alignment = metadata.get('general.alignment', 32)
  if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
    raise ValueError(
      f"GGUF file '{path}' has general.alignment {alignment!r}; expected a power of 2."
    )
  return metadata, _place(entries, cursor, alignment)


class _Cursor:
  """Reads little-endian values from front to back and never beyond the end."""

  def __init__(self, data: mmap.mmap, path: object):
    self.data, self.path, self.offset, self.size = data, path, 0, len(data)

  def skip(self, count: int, what: str) -> int:
    """Moves over `count` bytes and says where they start."""
    start = self.offset
    if count > self.size - start:
      raise ValueError(
        f"GGUF file '{self.path}' is cut short or damaged: {what} needs {count} bytes at byte "
        f'{start}, the file has {self.size}.'
      )
    self.offset += count
    return start

  def scalar(self, letter: str, what: str) -> Any:
    form = '<' + letter
    return struct.unpack_from(form, self.data, self.skip(struct.calcsize(form), what))[0]

  def string(self, what: str) -> str:
    length = self.scalar('Q', what)
    start = self.skip(length, what)
    try:
      return self.data[start : start + length].decode()
    except UnicodeDecodeError as error:
      raise ValueError(f"GGUF file '{self.path}': {what} is not UTF-8: {error}.") from error


def _counts(cursor: _Cursor) -> tuple[int, int]:
  """Checks magic and version; the numbers of tensors and of metadata pairs."""
  magic = bytes(cursor.data[:4])
  if magic != b'GGUF':
    raise ValueError(f"'{cursor.path}' starts with {magic!r}; a GGUF file starts with b'GGUF'.")
  cursor.skip(4, 'the magic')
  version = cursor.scalar('I', 'the version')
  if version not in _VERSIONS:
    swapped = int.from_bytes(version.to_bytes(4, 'little'), 'big')
    order = ' (it is big-endian)' if swapped in _VERSIONS else ''
    raise ValueError(
      f"GGUF file '{cursor.path}' has version {version}{order}; expected 2 or 3, little-endian."
    )
  return cursor.scalar('Q', 'the tensor count'), cursor.scalar('Q', 'the metadata count')


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
  what = f"the metadata '{key}'"
  if kind == _STRING:
    return cursor.string(what)
  if kind == _ARRAY:
    return _array(cursor, cursor.scalar('I', what), cursor.scalar('Q', what), what)
  if kind not in _SCALARS:
    raise ValueError(f"GGUF file '{cursor.path}': {what} has the unknown type {kind}.")
  return cursor.scalar(_SCALARS[kind], what)


def _array(cursor: _Cursor, kind: int, count: int, what: str) -> list[Any]:
  if kind == _STRING:
    if count > (cursor.size - cursor.offset) // 8:  # a string takes 8 bytes at least
      cursor.skip(8 * count, what)
    return [cursor.string(what) for _ in range(count)]
  if kind not in _SCALARS:
    raise ValueError(f"GGUF file '{cursor.path}': {what} is an array of the unknown type {kind}.")
  dtype = np.dtype(_SCALARS[kind]).newbyteorder('<')
  start = cursor.skip(count * dtype.itemsize, what)
  return np.frombuffer(cursor.data, dtype, count, start).tolist()


def _entry(cursor: _Cursor, number: int) -> tuple[str, tuple[int, ...], int, int]:
  """Name, shape [out, in], type number and offset of the next tensor."""
  name = cursor.string(f'the name of tensor {number}')
  what = f"the entry of tensor '{name}'"
  n_dims = cursor.scalar('I', what)
  if not 1 <= n_dims <= _MAX_DIMS:
    raise ValueError(
      f"Tensor '{name}' of '{cursor.path}' has {n_dims} dimensions; expected 1 to {_MAX_DIMS}."
    )
  dims = tuple(cursor.scalar('Q', what) for _ in range(n_dims))
  return name, dims[::-1], cursor.scalar('I', what), cursor.scalar('Q', what)


def _place(
  entries: list[tuple[str, tuple[int, ...], int, int]], cursor: _Cursor, alignment: int
) -> dict[str, TensorInfo]:
  """Absolute places; checks types, block sizes, alignment, the end of the file and overlaps."""
  start = -(-cursor.offset // alignment) * alignment
  tensors: dict[str, TensorInfo] = {}
  for name, shape, kind, offset in entries:
    subject = f"Tensor '{name}' of '{cursor.path}'"
    if name in tensors:
      raise ValueError(f'{subject} is there twice.')
    word, nbytes = _size(shape, kind, subject)
    if offset % alignment:
      raise ValueError(f'{subject} has offset {offset}; expected a multiple of {alignment}.')
    if start + offset + nbytes > cursor.size:
      raise ValueError(
        f'{subject}, {word} {shape}, takes bytes {start + offset} to {start + offset + nbytes}; '
        f'the file has {cursor.size}: it is cut short or its header lies.'
      )
    tensors[name] = TensorInfo(
      shape=shape, kind=word, start=start + offset, stop=start + offset + nbytes
    )
  _check_overlaps(tensors, cursor.path)
  return tensors


def _size(shape: tuple[int, ...], kind: int, subject: str) -> tuple[str, int]:
  """The type's name and the tensor's bytes."""
  from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

  known = {int(member): member for member in GGMLQuantizationType}
  if kind not in known:
    raise ValueError(
      f'{subject} has the unknown type {kind}. Known: '
      f'{", ".join(f"{number} {member.name}" for number, member in known.items())}.'
    )
  block, nbytes = GGML_QUANT_SIZES[known[kind]]
  if min(shape) < 1 or shape[-1] % block:
    raise ValueError(
      f'{subject} has shape {shape} of {known[kind].name}; expected sizes of 1 or more, the last '
      f'a multiple of {block}.'
    )
  return known[kind].name, math.prod(shape) // block * nbytes


def _check_overlaps(tensors: dict[str, TensorInfo], path: object) -> None:
  end, before = 0, ''
  for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
    if info.start < end:
      raise ValueError(
        f"Tensor '{name}' of '{path}' starts at byte {info.start}, inside '{before}', which ends "
        f'at {end}.'
      )
    end, before = info.stop, name

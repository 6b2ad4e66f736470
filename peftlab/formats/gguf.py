"""A GGUF file as a lazy mapping of tensors, dequantized one at a time or as raw blocks."""

from collections.abc import Iterator, Mapping
import mmap
import os
from typing import Any, TypeVar

import einops
import numpy as np

from peftlab._registry import did_you_mean
from peftlab.formats import files
from peftlab.formats.gguf_header import TensorInfo, read_header

T = TypeVar('T')


class GGUFFile(Mapping[str, np.ndarray]):
  """A lazy, read-only mapping: tensor name -> float32 array, a linear weight as [out, in].

  Attributes:
    path: the file.
    metadata: every key of the file -> Python scalar, string or list.
    tensors: name -> TensorInfo (shape, kind, place), in the order of the file.

  Raises:
    ValueError: the file is missing, is not GGUF, is cut short, or its header lies about types,
      shapes or offsets. No memory is taken for what a header only claims.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = files.existing_file(path)
    if not self.path.stat().st_size:
      raise ValueError(f"'{self.path}' is empty; a GGUF file starts with b'GGUF'.")
    with self.path.open('rb') as file:
      self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    self.metadata, self.tensors = read_header(self._data, path=self.path)

  def __getitem__(self, name: str) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    info = self.info(name)
    rows = self._rows(info)
    try:
      values = dequantize(rows, GGMLQuantizationType[info.kind])
    except NotImplementedError as error:
      raise ValueError(
        f"Tensor '{name}' of '{self.path}' has type {info.kind}, which cannot be dequantized."
      ) from error
    return values.astype(np.float32, copy=False).reshape(info.shape)

  def blocks(self, name: str) -> np.ndarray:
    """The stored bytes of `name`, unread: uint8 [..., out, blocks, bytes per block].

    A block of Q4_1 is 20 bytes for 32 inputs: scale d (f16), minimum m (f16), 16 bytes of codes,
    the low halves first: w[i] = d * (byte[i] & 15) + m, w[i + 16] = d * (byte[i] >> 4) + m.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    info = self.info(name)
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[info.kind]]
    data = np.frombuffer(self._data, np.uint8, info.stop - info.start, info.start)
    return data.reshape(*info.shape[:-1], info.shape[-1] // size, nbytes)

  def _rows(self, info: TensorInfo) -> np.ndarray:
    """The bytes of a tensor in the dtype and shape that gguf's dequantize takes."""
    plain = {'F32': '<f4', 'F16': '<f2'}
    dtype = np.dtype(plain.get(info.kind, np.uint8))
    count = (info.stop - info.start) // dtype.itemsize
    return np.frombuffer(self._data, dtype, count, info.start).reshape(*info.shape[:-1], -1)

  def info(self, name: str) -> TensorInfo:
    """Shape, kind and place of `name`; ValueError with the nearest name where it is absent."""
    if name not in self.tensors:
      near = did_you_mean(name, self.tensors)
      raise ValueError(
        f"No tensor '{name}' in '{self.path}'{near or '.'} It holds {len(self.tensors)} tensors."
      )
    return self.tensors[name]

  def field(self, key: str, kind: type[T], *, default: T | None = None) -> T:
    """The metadata `key`, of type `kind`; a key without its architecture ('block_count') works too.

    Raises:
      ValueError: the key is absent and there is no default, or it has another type.
    """
    full = key if key in self.metadata else f'{self.metadata.get("general.architecture")}.{key}'
    if full not in self.metadata:
      if default is not None:
        return default
      near = did_you_mean(full, self.metadata)
      raise ValueError(f"GGUF file '{self.path}' has no metadata '{full}'{near or '.'}")
    value: Any = self.metadata[full]
    if type(value) is not kind:
      raise ValueError(
        f"GGUF file '{self.path}' has {full} = {value!r:.60}; expected a value of type "
        f'{kind.__name__}.'
      )
    return value

  def __contains__(self, name: object) -> bool:
    return name in self.tensors

  def __iter__(self) -> Iterator[str]:
    return iter(self.tensors)

  def __len__(self) -> int:
    return len(self.tensors)


def undo_rope_permutation(weight: np.ndarray, *, n_heads: int) -> np.ndarray:
  """Rows of llama.cpp's q or k weight in the order of the half-rotated RoPE.

  llama.cpp stores the rows of each head for interleaved RoPE: (half, 2) where the original has
  (2, half). Works on anything whose first axis is `out`: weights, biases, raw blocks.

  Args:
    weight: [heads * head_dim, ...].
    n_heads: the heads of this very weight (for k, the key/value heads).

  Raises:
    ValueError: the rows are not n_heads heads of even width.
  """
  if n_heads < 1 or weight.shape[0] % (2 * n_heads):
    raise ValueError(
      f'A weight of {weight.shape[0]} rows is not {n_heads} heads of even width: its rows cannot '
      'be brought into the order of half-rotated RoPE.'
    )
  pattern = '(heads half two) ... -> (heads two half) ...'
  return einops.rearrange(weight, pattern, heads=n_heads, two=2)

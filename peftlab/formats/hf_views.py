"""What the tensors of an HF folder mean: a text model inside a larger one, mxfp4 and fp8 codes."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
import re
from typing import Any, Protocol

import numpy as np

from peftlab.formats import mxfp4
from peftlab.formats.hf_weights import HfWeights

_BLOCKS, _SCALES, _SCALE_INV = '_blocks', '_scales', '_scale_inv'


class View(Protocol):
  """Tensors by the names of a family, made from the tensors of a folder.

  Attributes:
    directory: of the folder.
    config: of the model that is seen.
    tensors: name -> shape and dtype.
  """

  directory: pathlib.Path
  config: dict[str, Any]
  tensors: Mapping[str, Any]

  def __getitem__(self, name: str) -> np.ndarray:
    """The tensor `name`."""

  def parts(self, name: str) -> tuple[str, ...]:
    """The tensors of the folder that the tensor `name` is made from."""

  def is_coded(self, name: str) -> bool:
    """Whether these are codes and scales."""

  def stored(self, name: str, array: np.ndarray) -> dict[str, np.ndarray] | None:
    """What a folder holds for `array` in the place of the tensor `name`.

    Returns:
      {each of `parts`: array}; None where it cannot be told in the folder's own codes.
    """


@dataclasses.dataclass(frozen=True)
class Meaning:
  """Shape and dtype of a tensor that is computed from others."""

  shape: tuple[int, ...]
  dtype: np.dtype


class PlainView:
  """The folder as it is."""

  def __init__(self, source: HfWeights):
    self.source, self.directory, self.config = source, source.directory, source.config
    self.tensors: Mapping[str, Any] = source.tensors

  def __getitem__(self, name: str) -> np.ndarray:
    return self.source[name]

  def parts(self, name: str) -> tuple[str, ...]:
    """See `View.parts`."""
    return (name,)

  def is_coded(self, name: str) -> bool:
    """See `View.is_coded`."""
    return len(self.parts(name)) > 1

  def stored(self, name: str, array: np.ndarray) -> dict[str, np.ndarray] | None:
    """See `View.stored`."""
    (part,) = self.parts(name)
    return {part: array}


class TextView(PlainView):
  """The text model of a folder that holds one for images or sound beside it.

  Args:
    source: the folder.
    prefixes: how names begin there -> how they begin in a text model of its own. Other tensors are
      not of it.
  """

  def __init__(self, source: HfWeights, prefixes: Mapping[str, str]):
    super().__init__(source)
    self._names, self._prefixes = {}, prefixes
    for name in source.tensors:
      for theirs, ours in prefixes.items():
        if name.startswith(theirs):
          self._names[ours + name.removeprefix(theirs)] = name
          break
    self.tensors = {ours: source.tensors[name] for ours, name in self._names.items()}
    outer = {k: v for k, v in source.config.items() if k == 'tie_word_embeddings'}
    text = source.config.get('text_config')
    if not isinstance(text, dict):
      raise ValueError(f"'{source.directory / 'config.json'}' has no text_config.")
    self.config = outer | text

  def __getitem__(self, name: str) -> np.ndarray:
    return self.source[self._names[name]]

  def parts(self, name: str) -> tuple[str, ...]:
    """See `View.parts`."""
    for theirs, ours in self._prefixes.items():
      if name.startswith(ours):
        return (self._names.get(name, theirs + name.removeprefix(ours)),)
    return (name,)


class Mxfp4View(PlainView):
  """A folder whose experts are mxfp4 codes and scales [..., out, in]: stacks [..., in, out]."""

  def __init__(self, source: HfWeights):
    super().__init__(source)
    if not _is_quantized(source, 'mxfp4'):
      return
    self.config = _unquantized(source.config)
    tensors: dict[str, Any] = {}
    for name, info in source.tensors.items():
      if name.endswith(_BLOCKS):
        *outer, groups, _ = info.shape
        stack, outs = outer[:-1], outer[-1]
        shape = (*stack, groups * mxfp4.GROUP, outs)
        tensors[name.removesuffix(_BLOCKS)] = Meaning(shape, np.dtype(np.float32))
      elif not name.endswith(_SCALES):
        tensors[name] = info
    self.tensors = tensors

  def parts(self, name: str) -> tuple[str, ...]:
    """See `View.parts`."""
    return (name + _BLOCKS, name + _SCALES) if name + _BLOCKS in self.source else (name,)

  def __getitem__(self, name: str) -> np.ndarray:
    if not self.is_coded(name):
      return self.source[name]
    decoded = mxfp4.decode(self.source[name + _BLOCKS], self.source[name + _SCALES])
    return decoded.swapaxes(-1, -2)

  def stored(self, name: str, array: np.ndarray) -> dict[str, np.ndarray] | None:
    """See `View.stored`; None where a value is no code under the folder's scales."""
    if not self.is_coded(name):
      return {name: array}
    scales = self.source[name + _SCALES]
    codes = mxfp4.encode(np.asarray(array, np.float32).swapaxes(-1, -2), scales)
    return None if codes is None else {name + _BLOCKS: codes, name + _SCALES: scales}


class Fp8View(PlainView):
  """A folder whose matrices may be float8 codes with a scale per block, [out, in].

  Tensors of layers from num_hidden_layers on, which predict several tokens ahead, are not seen.
  """

  def __init__(self, source: HfWeights):
    super().__init__(source)
    layers = source.config.get('num_hidden_layers')
    seen = {n: i for n, i in source.tensors.items() if not _is_behind(n, layers)}
    self._block: tuple[int, ...] | None = None
    if _is_quantized(source, 'fp8'):
      self._block = tuple(source.config['quantization_config'].get('weight_block_size') or ())
      if len(self._block) != 2:
        raise ValueError(f"'{source.directory / 'config.json'}' has no weight_block_size of two.")
      self.config = _unquantized(source.config)
      coded = {n.removesuffix(_SCALE_INV) for n in seen if n.endswith(_SCALE_INV)}
      seen = {
        n: Meaning(i.shape, np.dtype(np.float32)) if n in coded else i
        for n, i in seen.items()
        if not n.endswith(_SCALE_INV)
      }
    self.tensors = seen

  def parts(self, name: str) -> tuple[str, ...]:
    """See `View.parts`."""
    coded = self._block is not None and name + _SCALE_INV in self.source
    return (name, name + _SCALE_INV) if coded else (name,)

  def _scales(self, name: str) -> np.ndarray | None:
    """Of the tensor `name`, one per element; None where it is not coded."""
    if self._block is None or not self.is_coded(name):
      return None
    scales, shape = self.source[name + _SCALE_INV], self.source.info(name).shape
    each = scales.repeat(self._block[0], axis=0).repeat(self._block[1], axis=1)
    return np.asarray(each[: shape[0], : shape[1]], np.float32)

  def __getitem__(self, name: str) -> np.ndarray:
    scales = self._scales(name)
    return self.source[name] if scales is None else self.source[name].astype(np.float32) * scales

  def stored(self, name: str, array: np.ndarray) -> dict[str, np.ndarray] | None:
    """See `View.stored`; None where a value is no code under the folder's scales."""
    scales = self._scales(name)
    if scales is None:
      return {name: array}
    array = np.asarray(array, np.float32)
    codes = (array / scales).astype(self.source.info(name).dtype)
    if not np.array_equal(codes.astype(np.float32) * scales, array):
      return None
    return {name: codes, name + _SCALE_INV: self.source[name + _SCALE_INV]}


def _is_quantized(source: HfWeights, method: str) -> bool:
  quantization = source.config.get('quantization_config')
  if quantization is None:
    return False
  given = quantization.get('quant_method') if isinstance(quantization, dict) else None
  if given != method:
    raise ValueError(
      f"'{source.directory / 'config.json'}' has quant_method {given!r}; expected {method!r}."
    )
  return True


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in config.items() if name != 'quantization_config'}


def _is_behind(name: str, layers: Any) -> bool:
  number = re.match(r'model\.layers\.(\d+)\.', name)
  return isinstance(layers, int) and number is not None and int(number[1]) >= layers

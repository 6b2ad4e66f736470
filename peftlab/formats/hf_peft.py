"""The HF PEFT LoRA adapter folder, both ways, as a config and plain numpy arrays."""

from collections.abc import Iterable, Mapping
import dataclasses
import os
import pathlib
import re
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

from peftlab._registry import did_you_mean
from peftlab.formats import files, peft_config
from peftlab.formats.safetensors_file import SafetensorsFile, write_safetensors

CONFIG = 'adapter_config.json'
TENSORS = 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
# What stands behind the layer's path in a key -> the field of Factors.
_ENDS = {
  'lora_A.weight': 'a',
  'lora_B.weight': 'b',
  'lora_embedding_A': 'a',
  'lora_embedding_B': 'b',
  'lora_magnitude_vector': 'magnitude',
  'base_layer.weight': 'base',
}
_FLOATS = tuple(np.dtype(d) for d in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
  """What PEFT stores for one layer.

  Attributes:
    a: [rank, in]; for an embedding `in` is the vocabulary.
    b: [out, rank].
    embedding: the layer is an embedding (PEFT names its arrays differently).
    magnitude: [out], DoRA's, where use_dora is set.
    base: a copy of the layer's frozen weight [vocab, out]; PEFT stores it beside adapted
      embeddings.
  """

  a: np.ndarray
  b: np.ndarray
  embedding: bool = False
  magnitude: np.ndarray | None = None
  base: np.ndarray | None = None


def write_peft_folder(
  directory: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes adapter_model.safetensors and adapter_config.json, after all checks, both or none.

  Args:
    directory: made where it does not exist; its parent exists.
    config: PEFT's LoraConfig fields; `r`, `lora_alpha`, `target_modules` are needed, the others
      default to a plain LoRA adapter of a causal language model.
    tensors: PEFT keys -> arrays, see `to_tensors`.

  Raises:
    ValueError: a config or tensors that `read_peft_folder` would refuse, or a field PEFT 0.21.2
      does not have. Nothing is written then.
  """
  directory = pathlib.Path(directory)
  subject = f"PEFT folder '{directory}'"
  full = peft_config.check_config(config, subject=subject, strict=True)
  _check_tensors(tensors, full, subject)
  files.existing_folder(directory.parent)
  directory.mkdir(exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='.', dir=directory) as name:
    staged = pathlib.Path(name)
    write_safetensors(staged / TENSORS, tensors, metadata={'format': 'pt'})
    files.write_json(staged / CONFIG, full)
    # Killed between these lines: a folder that is refused, never new tensors with an old config.
    (directory / CONFIG).unlink(missing_ok=True)
    os.replace(staged / TENSORS, directory / TENSORS)
    os.replace(staged / CONFIG, directory / CONFIG)


def read_peft_folder(
  directory: str | os.PathLike[str],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """The config, completed with PEFT's defaults, and the arrays by PEFT key, in the file's dtype.

  Raises:
    ValueError: a missing folder or file, a pickle (adapter_model.bin), damaged JSON or
      safetensors, a peft_type or a field we do not read, A without B, a rank that is not the
      config's, shapes that disagree, a NaN or infinity, a layer target_modules does not select.
  """
  directory = files.existing_folder(directory)
  raw = files.read_json(directory / CONFIG)
  config = peft_config.check_config(
    raw, subject=f"PEFT config '{directory / CONFIG}'", strict=False
  )
  if not (directory / TENSORS).is_file():
    for name in files.pickles_in(directory):
      files.refuse_pickle(directory / name)
  tensors = dict(SafetensorsFile(directory / TENSORS))
  _check_tensors(tensors, config, f"PEFT tensors '{directory / TENSORS}'")
  return config, tensors


def to_factors(tensors: Mapping[str, np.ndarray]) -> dict[str, Factors]:
  """PEFT keys -> layer path ('model.layers.0.self_attn.q_proj') -> Factors. Inverse: `to_tensors`.

  Raises:
    ValueError: a key that is not PEFT's, or a layer that lacks A or B.
  """
  layers: dict[str, dict[str, np.ndarray]] = {}
  for key, array in tensors.items():
    path, end = _parse(key)
    layers.setdefault(path, {})[end] = array
  return {path: _factors(path, ends) for path, ends in layers.items()}


def _factors(path: str, ends: Mapping[str, np.ndarray]) -> Factors:
  embedding = 'lora_embedding_A' in ends or 'lora_embedding_B' in ends
  needed = [_end('a', embedding), _end('b', embedding)]
  if not set(needed) <= set(ends) or (
    embedding and ends.keys() & {'lora_A.weight', 'lora_B.weight'}
  ):
    raise ValueError(f"'{path}' has {', '.join(sorted(ends))}; expected {' and '.join(needed)}.")
  return Factors(embedding=embedding, **{_ENDS[end]: array for end, array in ends.items()})


def to_tensors(factors: Mapping[str, Factors]) -> dict[str, np.ndarray]:
  """Layer path -> Factors as PEFT keys -> arrays. Inverse: `to_factors`."""
  tensors = {}
  for path, layer in factors.items():
    for name in ('a', 'b', 'magnitude', 'base'):
      if getattr(layer, name) is not None:
        tensors[_key(path, name, layer.embedding)] = np.asarray(getattr(layer, name))
  return tensors


def target_names(paths: Iterable[str], *, among: Iterable[str]) -> list[str]:
  """target_modules that selects exactly `paths` of the base's layers `among`, sorted.

  The last word where all layers of that name are adapted ('q_proj'), else the whole path.
  """
  paths = set(paths)
  others = {path.rpartition('.')[2] for path in among if path not in paths}
  words = {path: path.rpartition('.')[2] for path in paths}
  return sorted({path if word in others else word for path, word in words.items()})


def _key(path: str, field: str, embedding: bool) -> str:
  return f'{_PREFIX}{path}.{_end(field, embedding)}'


def _end(field: str, embedding: bool) -> str:
  """The end of the key of a field of Factors."""
  ends = [end for end, name in _ENDS.items() if name == field]
  return ends[-1] if embedding else ends[0]


def _parse(key: str) -> tuple[str, str]:
  """The layer's path and the end of a PEFT key."""
  ends = '|'.join(re.escape(end) for end in _ENDS)
  match = re.fullmatch(rf'{re.escape(_PREFIX)}(.+)\.({ends})', key)
  if match is None:
    near = did_you_mean('.'.join(key.split('.')[-2:]), _ENDS)
    raise ValueError(
      f"The key '{key}' is not one of PEFT's{near or '.'} Expected {_PREFIX}PATH. and one of: "
      f'{", ".join(_ENDS)}.'
    )
  return match[1], match[2]


def _check_tensors(
  tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], subject: str
) -> None:
  if not tensors:
    raise ValueError(f'{subject}: no tensors; expected lora_A and lora_B of at least one layer.')
  for key, array in tensors.items():
    if array.dtype not in _FLOATS:
      raise ValueError(f"{subject}: '{key}' has dtype {array.dtype}; expected a float.")
    if not np.isfinite(array.astype(np.float32)).all():
      raise ValueError(f"{subject}: '{key}' holds a NaN or an infinity.")
  try:
    factors = to_factors(tensors)
  except ValueError as error:
    raise ValueError(f'{subject}: {error}') from error
  for path, layer in factors.items():
    _check_layer(path, layer, config, subject)
  peft_config.check_targets(config, factors, subject=subject)


def _check_layer(path: str, layer: Factors, config: Mapping[str, Any], subject: str) -> None:
  rank = peft_config.rank_of(config, path)
  a, b = layer.a.shape, layer.b.shape
  if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
    raise ValueError(
      f"{subject}: '{path}' has A {a} and B {b}; by the config its rank is {rank}: expected "
      f'A ({rank}, in) and B (out, {rank}).'
    )
  if (layer.magnitude is not None) != config['use_dora']:
    state = 'no' if layer.magnitude is None else 'a'
    raise ValueError(
      f"{subject}: '{path}' has {state} lora_magnitude_vector; use_dora is {config['use_dora']}."
    )
  if layer.magnitude is not None and layer.magnitude.shape != b[:1]:
    raise ValueError(
      f"{subject}: '{path}' has lora_magnitude_vector {layer.magnitude.shape}; expected {b[:1]}."
    )
  if layer.base is not None and layer.base.shape != (a[1], b[0]):
    raise ValueError(
      f"{subject}: '{path}' has base_layer.weight {layer.base.shape}; expected {(a[1], b[0])}."
    )

"""The adapter folder of HF PEFT, both ways, as a config and plain numpy arrays."""

from collections.abc import Mapping
import os
import pathlib
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

from peftlab.formats import files, peft_config, peft_values
from peftlab.formats.safetensors_file import SafetensorsFile, write_safetensors

CONFIG = 'adapter_config.json'
TENSORS = 'adapter_model.safetensors'
_FLOATS = tuple(np.dtype(d) for d in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
_PLACES = (np.dtype(np.int32), np.dtype(np.int64))


def write_peft_folder(
  directory: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes adapter_model.safetensors and adapter_config.json, after all checks, both or none.

  Args:
    directory: made where it does not exist; its parent exists.
    config: PEFT's keys; `peft_type`, `target_modules` and those of its type that have no default
      are needed, the others default to a plain adapter of a causal language model.
    tensors: PEFT keys -> arrays, see `peft_writing.write`.

  Raises:
    ValueError: a config or tensors that `read_peft_folder` would refuse, or a key PEFT 0.21.2
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
    files.write_json(staged / CONFIG, peft_config.written(full))
    # Killed between these lines: a folder that is refused, never new tensors with an old config.
    (directory / CONFIG).unlink(missing_ok=True)
    os.replace(staged / TENSORS, directory / TENSORS)
    os.replace(staged / CONFIG, directory / CONFIG)


def read_peft_folder(
  directory: str | os.PathLike[str], *, peft_type: str | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """The config, completed with PEFT's defaults, and the arrays by PEFT key, in the file's dtype.

  Args:
    directory: of the folder.
    peft_type: the one that it must be of; None: any that is known.

  Raises:
    ValueError: a missing folder or file, a pickle (adapter_model.bin), damaged JSON or
      safetensors, a peft_type or a key we do not read, a layer that lacks a tensor, a size that is
      not the config's, shapes that disagree, a NaN or infinity, a layer that is not selected.
  """
  directory = files.existing_folder(directory)
  raw = files.read_json(directory / CONFIG)
  subject = f"PEFT config '{directory / CONFIG}'"
  if peft_type is not None and raw.get('peft_type') != peft_type:
    raise ValueError(f'{subject} has peft_type {raw.get("peft_type")!r}; expected {peft_type!r}.')
  config = peft_config.check_config(raw, subject=subject, strict=False)
  if not (directory / TENSORS).is_file():
    for name in files.pickles_in(directory):
      files.refuse_pickle(directory / name)
  tensors = dict(SafetensorsFile(directory / TENSORS))
  _check_tensors(tensors, config, f"PEFT tensors '{directory / TENSORS}'")
  return config, tensors


def _check_tensors(
  tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], subject: str
) -> None:
  places = peft_values.integer_ends(config, subject=subject)
  for key, array in tensors.items():
    wanted, word = (_PLACES, 'an int32') if key.endswith(places) else (_FLOATS, 'a float')
    if array.dtype not in wanted:
      raise ValueError(f"{subject}: '{key}' has dtype {array.dtype}; expected {word}.")
    if array.dtype in _FLOATS and not np.isfinite(array.astype(np.float32)).all():
      raise ValueError(f"{subject}: '{key}' holds a NaN or an infinity.")
  peft_values.read(config, tensors, subject=subject)

"""What the writers of peft_zoo share: values by name, training by hand, files."""

import json
import pathlib
import re
import tempfile
from typing import Any
import zlib

import numpy as np
import peft
import torch

# Trained values of these lie around their start, of all others around 0.
AROUND_START = re.compile(r'magnitude|ia3_l|boft_s|norm|ln_tuning|tokens|modules_to_save|\.bias$')
SETS = ('target_modules', 'feedforward_modules', 'exclude_modules')


def seed_of(name: str) -> int:
  return zlib.crc32(name.encode())


def random(name: str, shape: tuple[int, ...], std: float = 1.0) -> torch.Tensor:
  """float32 normal numbers that depend on the name only."""
  rng = np.random.default_rng(seed_of(name))
  return torch.from_numpy((std * rng.standard_normal(shape)).astype(np.float32))


def trainables(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
  """Trainable arrays under PEFT's own key, or under their own where PEFT does not save them."""
  keys = {v.data_ptr(): k for k, v in peft.get_peft_model_state_dict(model).items()}
  found = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
  return {keys.get(p.data_ptr(), name.replace('.default', '')): p for name, p in sorted(found)}


def count(model: torch.nn.Module) -> int:
  return sum(p.numel() for p in model.parameters() if p.requires_grad)


def train(model: torch.nn.Module, name: str, std: float, near_start: bool = False) -> None:
  """Gives every trainable array its random value."""
  names = {id(p): n for n, p in model.named_parameters()}
  for key, value in trainables(model).items():
    start = value.data if near_start or AROUND_START.search(names[id(value)]) else 0.0
    value.data = (start + random(f'{name} {key}', tuple(value.shape), std)).to(value.dtype)


def as_numpy(value: Any, dtype: type = np.float32) -> np.ndarray:
  value = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
  return value.astype(dtype) if value.dtype.kind == 'f' else value


def save_arrays(path: pathlib.Path, arrays: dict[str, Any], dtype: type = np.float32) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  np.savez_compressed(path, **{key: as_numpy(value, dtype) for key, value in arrays.items()})


def save_json(path: pathlib.Path, value: Any) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value, indent=2, sort_keys=True) + '\n')


def in_order(fields: dict[str, Any]) -> dict[str, Any]:
  """A config with its sets in order; PEFT's own order changes from run to run."""
  return {k: sorted(v) if k in SETS and isinstance(v, list) else v for k, v in fields.items()}


def config_of(config: peft.PeftConfig) -> dict[str, Any]:
  """What PEFT writes into adapter_config.json."""
  with tempfile.TemporaryDirectory() as folder:
    config.save_pretrained(folder)
    return in_order(json.loads((pathlib.Path(folder) / 'adapter_config.json').read_text()))

"""The rows of a sweep for TensorBoard's HPARAMS page."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from peftlab.sweep import table

FOLDER = 'tensorboard'


def write(root: str | os.PathLike[str]) -> pathlib.Path:
  """Writes one run per trial that has ended, with its setting and its losses.

  Args:
    root: of the sweep; files go to ROOT/report/tensorboard, which `tensorboard --logdir` takes.
  """
  import tensorboardX

  folder = pathlib.Path(root) / 'report' / FOLDER
  for old in folder.rglob('events.out.tfevents.*'):
    old.unlink()
  for entry in table.read(root):
    if entry.loss is None:
      continue
    found = {
      'held_out_loss': entry.loss,
      'held_out_before': entry.row['held_out_before'],
      'adapter_bytes': entry.row['bytes']['adapter'],
    }
    knobs = {name: _plain(value) for name, value in entry.setting.items()}
    with tensorboardX.SummaryWriter(logdir=str(folder), write_to_disk=True) as board:
      board.add_hparams(knobs, {k: float(v) for k, v in found.items()}, name=entry.id)
  return folder


def _plain(value: Any) -> Any:
  return value if isinstance(value, bool | int | float | str) else str(value)

"""Losses of single held-out rows: what paired tests compare, and how they are kept."""

from __future__ import annotations

from collections.abc import Iterable
import functools
import os
import pathlib
from typing import Any

from flax import nnx
import jax
import numpy as np

from peftlab import _parts, _processes, _specs
from peftlab.formats import files
from peftlab.train import devices, loss

FILE = 'items.npz'
Path = str | os.PathLike[str]


def row_losses(
  graph: nnx.GraphDef, adapter: Any, base: Any, state: Any, batch: loss.Batch
) -> tuple[jax.Array, jax.Array]:
  """(summed losses, tokens that count) of every row of a batch, both float32 [rows].

  One row goes through the model at a time, so that what is in memory does not grow with the batch.
  """
  parts = _parts.Parts(graph, adapter, base, state)

  def one(row: loss.Batch) -> tuple[jax.Array, jax.Array]:
    rows = {name: array[None] for name, array in row.items()}
    return loss.summed_loss(parts, rows)[0], loss.count_tokens(rows)

  return jax.lax.map(one, dict(batch))


@functools.lru_cache(maxsize=64)
def _compiled(graph: nnx.GraphDef) -> Any:
  return jax.jit(functools.partial(row_losses, graph))


def item_losses(
  parts: _parts.Parts, batches: Iterable[loss.Batch], mesh: jax.sharding.Mesh | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """(summed losses, tokens) of every held-out row, float32 [items].

  Args:
    parts: in evaluation mode.
    batches: held-out batches, on the host.
    mesh: where the base lies.
  """
  run, found = _compiled(parts.graph), []
  with _specs.using(mesh):
    for batch in batches:
      placed = devices.place_batch(batch, mesh)
      losses = run(parts.adapter, parts.base, parts.state, placed)
      found.append(tuple(map(_processes.host, losses)))
  return join(found)


def join(found: Iterable[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
  """The items of some batches; the rows that only fill up a batch are left out."""
  sums, tokens = (np.concatenate(x).astype(np.float32) for x in zip(*found, strict=True))
  return sums[tokens > 0], tokens[tokens > 0]


def mean(sums: np.ndarray, tokens: np.ndarray) -> float:
  """The mean loss over all tokens, nats per token."""
  total = np.sum(sums, dtype=np.float64) / np.sum(tokens, dtype=np.float64)
  return float(total)


def write(folder: Path, sums: np.ndarray, tokens: np.ndarray) -> None:
  """Writes the items of a trial: 8 bytes each, before compression."""
  path = pathlib.Path(folder) / FILE
  files.replace_file(path, lambda file: np.savez_compressed(file, sums=sums, tokens=tokens))


def read(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
  """(summed losses, tokens) of the items of a trial; None where there are none."""
  path = pathlib.Path(folder) / FILE
  if not path.exists():
    return None
  with np.load(path, allow_pickle=False) as data:
    return data['sums'], data['tokens']

"""EVA: LoRA from the directions of the data (Paischer et al. 2024, arXiv:2410.07170)."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import re
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab.plugins import lora


@peftlab.register_adapter('eva')
@dataclasses.dataclass(frozen=True, kw_only=True)
class EVA(lora.LowRank):
  """y = x W + s (x A) B, A of the inputs' main directions, B 0. Trainable: rank (in + out).

  Attached, A is random as LoRA's, which a warning says; `start_from` makes it from data and gives
  each layer its rank.
  """

  started_by = 'peftlab.plugins.eva.start_from'


def start_from(
  model: nnx.Module,
  adapter: EVA,
  run: Callable[[nnx.Module, Any], Any],
  batches: Iterable[Any],
  *,
  where: Any = 'all-linear',
  rho: float = 1.0,
  **options: Any,
) -> tuple[nnx.Module, Any]:
  """`attach` with A from data: the first right singular vectors of each layer's centred inputs.

  Args:
    model: the base.
    adapter: its rank is the mean; alpha grows with a layer's rank, so that the scale is the same.
    run: `run(model, batch)` calls the model; what it returns is not used.
    batches: the data.
    where: see `attach`.
    rho: a layer gets at most rho x rank; the ranks go to the directions that explain most.
    **options: of `attach`.

  Raises:
    ValueError: rho below 1, experts that share their arrays, inputs that are all the same, or what
      `peftlab.input_moments` and `attach` raise.
  """
  if not rho >= 1:
    raise ValueError(f'rho is {rho}; it must be at least 1, where every layer gets the same rank.')
  if options.get('experts', 'each') != 'each':
    raise ValueError(
      "EVA finds directions for each expert, so they cannot share them; expected experts='each'."
    )
  moments = peftlab.input_moments(model, run, batches, where=where)
  found = {path: _directions(path, m) for path, m in moments.items()}
  ranks = _ranks({path: shares for path, (shares, _) in found.items()}, adapter.rank, rho)
  fields = {
    'rank': {_exact(path): rank for path, rank in ranks.items()},
    'alpha': {_exact(p): adapter.alpha * _growth(adapter, r) for p, r in ranks.items()},
  }
  chosen = [_exact(path) for path in ranks]
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', message='EVA is attached without')  # they come below
    made, report = peftlab.attach(model, adapter, where=chosen, fields=fields, **options)
  for path, node in nnx.iter_graph(made):
    if path in ranks:
      a = node.adapters[-1].a
      vectors = found[path][1][..., : ranks[path], :]  # [*layers, rank, in]
      stack = a.get_metadata().get('stack', ())
      value = np.moveaxis(np.swapaxes(vectors, -1, -2), range(len(stack)), stack)
      a[...] = jax.device_put(jnp.asarray(value, a.dtype), a[...].sharding)
  return made, report


def _growth(adapter: EVA, rank: int) -> float:
  return (rank / adapter.rank) ** (0.5 if adapter.rslora else 1.0)


def _exact(path: tuple) -> str:
  """A pattern for one path, and for no other that ends like it."""
  return f'(?:{re.escape(".".join(map(str, path)))})' if path else '.*'


def _directions(path: tuple, inputs: peftlab.Moments) -> tuple[np.ndarray, np.ndarray]:
  """(share of the variance that each explains, the directions [*layers, in, in]), largest first."""
  values, vectors = np.linalg.eigh(inputs.covariance)
  values, vectors = np.maximum(values[..., ::-1], 0), np.swapaxes(vectors, -1, -2)[..., ::-1, :]
  if not (values.sum(-1) > 1e-6 * np.square(inputs.mean).sum(-1)).all():
    name = '.'.join(map(str, path))
    raise ValueError(f'The inputs of {name} are all the same; EVA needs some that differ.')
  largest = np.take_along_axis(vectors, np.abs(vectors).argmax(-1, keepdims=True), -1)
  return values / values.sum(-1, keepdims=True), vectors * np.sign(largest)


def _ranks(shares: Mapping[tuple, np.ndarray], rank: int, rho: float) -> dict[tuple, int]:
  """How many directions each path gets, rank on average; layers of a stack get the same."""
  most = int(rho * rank)
  means = {path: s.reshape(-1, s.shape[-1]).mean(0)[:most] for path, s in shares.items()}
  order = sorted(((v, p) for p, mean in means.items() for v in mean), key=lambda x: -x[0])
  ranks: dict[tuple, int] = {}
  for _, path in order[: rank * len(means)]:
    ranks[path] = ranks.get(path, 0) + 1
  return ranks

"""EVA: LoRA from the directions of the data (Paischer et al. 2024, arXiv:2410.07170)."""

from collections.abc import Callable, Iterable
import dataclasses
import re
from typing import Any

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

  Attached, A is random as LoRA's; `start_from` makes it from data and gives each layer its rank.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs(peftlab.Adapter):
  """Changes nothing; the gradients of its slots are the count, sum and products of the inputs."""

  def slots(self):
    return {
      'count': peftlab.Slot(dims=''),
      'sum': peftlab.Slot(dims='in'),
      'products': peftlab.Slot(dims='in in'),
    }

  def apply(self, x, base, p):
    x = x.dense() if hasattr(x, 'dense') else x
    return base(x) + _noted(x.reshape(-1, base.shape[0]), p.count, p.sum, p.products)


@jax.custom_vjp
def _noted(x: jax.Array, count: jax.Array, total: jax.Array, products: jax.Array) -> jax.Array:
  """0, whose gradients are what is to be counted of x [tokens, in], whatever reaches it."""
  del count, total, products
  return jnp.zeros((), x.dtype)


def _noted_fwd(x: jax.Array, *slots: jax.Array) -> tuple[jax.Array, jax.Array]:
  return _noted(x, *slots), x


def _noted_bwd(x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
  del dy
  count = jnp.full((), x.shape[0], x.dtype)
  return jnp.zeros_like(x), count, x.sum(0), x.T @ x


_noted.defvjp(_noted_fwd, _noted_bwd)


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
    ValueError: no batch, or what `attach` raises.
  """
  seen, _ = peftlab.attach(model, _Inputs(), where=where, name='inputs')
  parts = peftlab.split(seen)

  @jax.jit
  def count(parts: Any, batch: Any) -> Any:
    def total(adapter: Any) -> jax.Array:
      y = run(peftlab.merge(parts.replace(adapter=adapter)), batch)
      return jnp.stack([jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(y)]).sum()

    return jax.grad(total)(parts.adapter)

  sums = None
  for batch in batches:
    new = count(parts, batch)
    sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
  if sums is None:
    raise ValueError('EVA starts from data; there was no batch.')
  held = peftlab.merge(parts.replace(adapter=sums))
  sites = {path: node for path, node in nnx.iter_graph(held) if hasattr(node, 'adapters')}
  found = {path: _directions(node.adapters[-1]) for path, node in sites.items()}
  ranks = _ranks(found, adapter.rank, rho)
  fields = {
    'rank': {_exact(path): rank for path, rank in ranks.items()},
    'alpha': {_exact(p): adapter.alpha * _growth(adapter, r) for p, r in ranks.items()},
  }
  chosen = [_exact(path) for path in ranks]
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


def _directions(inputs: Any) -> tuple[np.ndarray, np.ndarray]:
  """(share of the variance that each explains, the directions [*layers, in, in]), largest first."""
  stacks = {n: getattr(inputs, n).get_metadata().get('stack', ()) for n in ('sum', 'products')}
  count = np.asarray(inputs.count[...], np.float64)
  total, products = (
    np.moveaxis(np.asarray(getattr(inputs, n)[...], np.float64), s, range(len(s)))
    for n, s in stacks.items()
  )
  mean = total / count[..., None]
  centred = products - count[..., None, None] * mean[..., :, None] * mean[..., None, :]
  values, vectors = np.linalg.eigh(centred)
  values, vectors = np.maximum(values[..., ::-1], 0), np.swapaxes(vectors, -1, -2)[..., ::-1, :]
  largest = np.take_along_axis(vectors, np.abs(vectors).argmax(-1, keepdims=True), -1)
  return values / values.sum(-1, keepdims=True), vectors * np.sign(largest)


def _ranks(found: dict[tuple, Any], rank: int, rho: float) -> dict[tuple, int]:
  """How many directions each path gets, rank on average; layers of a stack get the same."""
  most = int(rho * rank)
  shares = {p: s.reshape(-1, s.shape[-1]).mean(0)[:most] for p, (s, _) in found.items()}
  order = sorted(((v, p) for p, s in shares.items() for v in s), key=lambda x: -x[0])
  ranks: dict[tuple, int] = {}
  for _, path in order[: rank * len(found)]:
    ranks[path] = ranks.get(path, 0) + 1
  return ranks

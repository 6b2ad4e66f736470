"""What reaches the layers of a model, measured on data: count, mean, covariance of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _attach, _parts
from peftlab._slot import Slot

_NAME = 'inputs'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
  """Of the inputs of one layer path; of a stack the layers come first. numpy, float64.

  Attributes:
    count: vectors seen, [*layers].
    mean: [*layers, in].
    covariance: [*layers, in, in], divided by the count.
  """

  count: np.ndarray
  mean: np.ndarray
  covariance: np.ndarray


def input_moments(
  model: nnx.Module,
  run: Callable[[nnx.Module, Any], Any],
  batches: Iterable[Any],
  *,
  where: Any = 'all-linear',
) -> dict[tuple, Moments]:
  """{path of a layer: the moments of its inputs}, in the layout, on the mesh of the model.

  Args:
    model: is not changed; one program is compiled for each shape of batch.
    run: `run(model, batch)` calls the model; what it returns is not used.
    batches: the data.
    where: which layers, see `attach`.

  Raises:
    ValueError: no batch, inputs that are not finite, or what `attach` raises.
  """
  seen, _ = _attach.attach(model, _Inputs(), where=where, name=_NAME)
  parts = _parts.split(seen)

  @jax.jit
  def measure(parts: _parts.Parts, batch: Any) -> Any:
    def total(adapter: Any) -> jax.Array:
      y = run(_parts.merge(parts.replace(adapter=adapter)), batch)
      return jnp.stack([jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(y)]).sum()

    return jax.grad(total)(parts.adapter)

  sums = None
  for batch in batches:
    new = measure(parts, batch)
    sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
  if sums is None:
    raise ValueError('There was no batch; expected at least one to measure the inputs of layers.')
  layers = _attach.adapted(_parts.merge(parts.replace(adapter=sums)))
  return {
    path: _moments(path, attached)
    for path, layer in layers.items()
    for attached in layer.adapters
    if attached.name == _NAME
  }


def _moments(path: tuple, held: Any) -> Moments:
  count, total, products = (_layers_first(getattr(held, n)) for n in ('count', 'sum', 'products'))
  if not np.isfinite(products).all():
    raise ValueError(f'The inputs of {_parts.path_name(path)} are not finite.')
  if not count.all():
    raise ValueError(f'No input reached {_parts.path_name(path)}; expected a layer that runs.')
  mean = total / count[..., None]
  outer = mean[..., :, None] * mean[..., None, :]
  return Moments(count=count, mean=mean, covariance=products / count[..., None, None] - outer)


def _layers_first(variable: Any) -> np.ndarray:
  stack = variable.get_metadata().get('stack', ())
  return np.moveaxis(np.asarray(variable[...], np.float64), stack, range(len(stack)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inputs(_adapter.Adapter):
  """Changes nothing; the gradients of its slots are the count, sum and products of the inputs."""

  def slots(self) -> dict[str, Slot]:
    return {
      'count': Slot(dims=''),
      'sum': Slot(dims='in'),
      'products': Slot(dims='in in'),
    }

  def apply(self, x: Any, base: _adapter.Base, p: _adapter.Values) -> jax.Array:
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

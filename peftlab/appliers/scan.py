"""The scan applier: one compiled layer, run over the layer axis of a stack."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from peftlab import _parts, _registry, _stack
from peftlab.appliers import applier, one_layer, remat


@_registry.appliers.register('scan')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan(applier.Applier):
  """`jax.lax.scan` over the layers: compile time does not grow with their number.

  Base arrays stacked at axis 0 in layer order are scanned over where they lie; at another axis, or
  in another order, each layer reads its slice, so that no transposed copy is made.

  Attributes:
    remat: what the backward pass recomputes: a word of `remat.POLICIES`, or none.
    unroll: layers per iteration of the compiled loop.
  """

  remat: str = 'none'
  unroll: int = 1

  def __post_init__(self):
    remat.check(self.remat)
    if self.unroll < 1:
      raise ValueError(f'Scan(unroll={self.unroll}): it must be at least 1.')

  def apply(
    self, layers: _parts.Parts, x: Any, body: applier.Body, *context: Any
  ) -> tuple[Any, applier.Created]:
    """See `Applier.apply`."""
    stacked = _stack.stacked(layers, self.axis)
    if stacked.length == 0:
      return x, applier.nothing_created(layers)
    layer = one_layer.Layer(layers, stacked, body, context, self.remat, in_loop=True)
    scanned, fixed = _scanned(layers, stacked)

    def step(carry: Any, xs: tuple) -> tuple[Any, one_layer.Leaves]:
      index, arrays = xs
      return layer(_one(fixed, stacked, index, arrays), carry)

    xs = (jnp.asarray(stacked.places), scanned)
    x, new = jax.lax.scan(step, x, xs, unroll=self.unroll)
    return x, layer.created(one_layer.at_places(new, stacked))


def _scanned(
  layers: _parts.Parts, stacked: _stack.Stacked
) -> tuple[one_layer.Leaves, one_layer.Leaves]:
  """(arrays scanned over, in layer order; arrays that each layer reads a slice of, or all of)."""
  scanned: one_layer.Leaves = {name: {} for name in one_layer.NAMES}
  fixed: one_layer.Leaves = {name: {} for name in one_layer.NAMES}
  for name in one_layer.NAMES:
    for path, value in _parts.flat(getattr(layers, name)).items():
      axis = stacked.axes[name][path]
      if axis is None or (name == 'base' and (axis or not stacked.in_order)):
        fixed[name][path] = value
      else:
        scanned[name][path] = jax.tree.map(
          lambda a, axis=axis: _in_layer_order(jnp.moveaxis(a, axis, 0), stacked), value
        )
  return scanned, fixed


def _in_layer_order(array: jax.Array, stacked: _stack.Stacked) -> jax.Array:
  return array if stacked.in_order else jnp.take(array, jnp.asarray(stacked.places), axis=0)


def _one(
  fixed: one_layer.Leaves, stacked: _stack.Stacked, index: jax.Array, arrays: one_layer.Leaves
) -> one_layer.Leaves:
  def take(array: jax.Array, axis: int | None) -> jax.Array:
    if axis is None:
      return array
    return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)

  return {
    name: arrays[name]
    | {
      path: jax.tree.map(lambda a, axis=stacked.axes[name][path]: take(a, axis), value)
      for path, value in fixed[name].items()
    }
    for name in one_layer.NAMES
  }

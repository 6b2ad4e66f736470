"""The sequential applier: a Python loop over the layers of a stack, unrolled when compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from peftlab import _parts, _registry, _stack
from peftlab.appliers import applier, one_layer, remat


@_registry.appliers.register('sequential')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(applier.Applier):
  """A Python loop over the layers.

  Attributes:
    remat: what the backward pass recomputes: a word of `remat.POLICIES`, or none.
  """

  remat: str = 'none'

  def __post_init__(self):
    remat.check(self.remat)

  def apply(
    self, layers: _parts.Parts, x: Any, body: applier.Body, *context: Any
  ) -> tuple[Any, applier.Created]:
    """See `Applier.apply`."""
    stacked = _stack.stacked(layers, self.axis)
    if stacked.length == 0:
      return x, applier.nothing_created(layers)
    layer = one_layer.Layer(layers, stacked, body, context, self.remat)
    found = []
    for place in stacked.places:
      x, new = layer(_one(layers, stacked, place), x)
      found.append(new)
    new = jax.tree.map(lambda *each: jnp.stack(each), *found)
    return x, layer.created(one_layer.at_places(new, stacked))


def _one(layers: _parts.Parts, stacked: _stack.Stacked, index: int) -> one_layer.Leaves:
  return {
    name: {
      path: jax.tree.map(lambda a, axis=stacked.axes[name][path]: _take(a, index, axis), value)
      for path, value in _parts.flat(getattr(layers, name)).items()
    }
    for name in one_layer.NAMES
  }


def _take(array: jax.Array, index: int, axis: int | None) -> jax.Array:
  if axis is None:
    return array
  return jax.lax.index_in_dim(array, index, axis, keepdims=False)

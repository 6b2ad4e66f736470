"""Lays the arrays of a stack out in another order, once, so that no run moves them."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _parts, _specs, _stack


def reorder(
  layers: nnx.Module, order: tuple[int, ...], *, axis: int = 0, donate: bool = False
) -> nnx.Module:
  """A stack whose place i holds layer `order[i]`; a place of -1 holds a copy that never runs.

  An array on a mesh stays there, its layer axis placed by the rules in force. Where the order is
  that of the stack already, the stack itself is returned.

  Args:
    layers: a stack, in any order, of arrays or of shapes.
    order: each layer once.
    axis: as in `Applier`.
    donate: each array given is freed once it has been read; the stack given is of no use then.
  """
  parts = _parts.split(layers)
  stacked = _stack.stacked(parts, axis)
  if stacked.order == order:
    return layers
  places = stacked.places
  source = tuple(places[n] for n in order)
  trees = {}
  for name in ('adapter', 'base', 'state'):
    moved = {}
    for path, value in _parts.flat(getattr(parts, name)).items():
      at = stacked.axes[name][path]
      moved[path] = value if at is None else jax.tree.map(_mover(source, at, donate), value)
    trees[name] = _parts.nest(moved)
  model: Any = _parts.merge(parts.replace(**trees))
  natural = order == tuple(range(len(order)))
  setattr(model, _stack.LAYER_ORDER, None if natural else order)
  return model


def _mover(source: tuple[int, ...], axis: int, donate: bool) -> Any:
  def move(array: Any) -> Any:
    sharding = _sharding(array, len(source), axis)
    if isinstance(array, jax.ShapeDtypeStruct):
      shape = (*array.shape[:axis], len(source), *array.shape[axis + 1 :])
      return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
    moved = _take(source, axis, sharding)(array)
    if donate:  # not by the jit: it warns where the two differ in shape
      moved.block_until_ready()
      array.delete()
    return moved

  return move


def _sharding(array: Any, places: int, axis: int) -> Any:
  """Where an array on a mesh goes: its layer axis by the rules, its other axes as they lie."""
  old = array.sharding
  if not isinstance(old, NamedSharding):
    return old
  entries = [*old.spec, *(None,) * (len(array.shape) - len(old.spec))]
  entries[axis] = _specs.spec_for(('layers',), old.mesh)[0]
  shape = (*array.shape[:axis], places, *array.shape[axis + 1 :])
  spec, _ = _specs.fit_spec(shape, PartitionSpec(*entries), old.mesh)
  return NamedSharding(old.mesh, spec)


@functools.lru_cache(maxsize=64)
def _take(source: tuple[int, ...], axis: int, sharding: Any) -> Any:
  placed = sharding if isinstance(sharding, NamedSharding) else None

  def take(array: jax.Array) -> jax.Array:
    return jnp.take(array, jnp.asarray(source), axis=axis, unique_indices=False)

  return jax.jit(take, out_shardings=placed)

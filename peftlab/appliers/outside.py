"""Layers outside of the stages of a pipeline: all devices run them, on a part of the rows each."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from peftlab import _specs
from peftlab.appliers import one_layer
from peftlab.appliers.schedule import Schedule
from peftlab.appliers.staged import AXIS

Leaves = one_layer.Leaves


def run_outside(
  layer: one_layer.Layer, plan: Schedule, leaves: Leaves, x: Any
) -> tuple[Any, list[Leaves]]:
  """The layers outside of the stages, which each stage keeps a share of.

  One layer of each stage is gathered at a time, as under FSDP, then they run one after the other.

  Returns:
    x after them, and for each of `plan.groups()` what `one_layer.Layer` gives, stacked.
  """
  found = []
  with _batch_over_stages(x, plan.stages):
    for place, count in plan.groups():
      group = {
        name: {
          path: _group(value, layer.stacked.axes[name][path], plan, place, count)
          for path, value in leaves[name].items()
        }
        for name in one_layer.NAMES
      }
      x, new = _run_group(layer, group, x)
      found.append(new)
  return x, found


def _run_group(layer: one_layer.Layer, group: Leaves, x: Any) -> tuple[Any, Leaves]:
  axes = layer.stacked.axes
  stacked = {n: {p: a for p, a in group[n].items() if axes[n][p] is not None} for n in group}

  def step(x: Any, own: Leaves) -> tuple[Any, Leaves]:
    return layer({n: group[n] | own[n] for n in group}, x)

  return lax.scan(step, x, stacked)


def _group(value: Any, axis: int | None, plan: Schedule, place: int, count: int) -> Any:
  """The arrays of the layers at one place of each stage, layer axis first, on every stage."""
  if axis is None:
    return value

  def one(array: jax.Array) -> jax.Array:
    cut = array.reshape(*array.shape[:axis], plan.stages, plan.held, *array.shape[axis + 1 :])
    here = lax.index_in_dim(cut, place, axis + 1, keepdims=False)
    here = _gathered(here, axis)
    return jnp.moveaxis(lax.slice_in_dim(here, 0, count, axis=axis), axis, 0)

  return jax.tree.map(one, value)


def _gathered(array: jax.Array, axis: int) -> jax.Array:
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.explicit_axes:
    spec = list(jax.typeof(array).sharding.spec)
    spec[axis] = None
    return jax.reshard(array, P(*spec))
  spec = [P.UNCONSTRAINED] * array.ndim
  return lax.with_sharding_constraint(array, P(*spec[:axis], None, *spec[axis + 1 :]))


def _batch_over_stages(x: Any, stages: int) -> Any:
  """Rules in which the rows of a batch lie over the stages too, where there are enough of them."""
  mesh = jax.sharding.get_abstract_mesh()
  rules = [
    (name, (*axes, AXIS) if name == 'batch' else axes) for name, axes in _specs.current_rules()
  ]
  over = math.prod(mesh.shape.get(a, 1) for n, axes in rules if n == 'batch' for a in axes)
  rows = {leaf.shape[0] if jnp.ndim(leaf) else 1 for leaf in jax.tree.leaves(x)}
  if any(n % max(over, stages) for n in rows):
    return contextlib.nullcontext()
  return _specs.use_rules(tuple(rules))


def put_back(staged: Leaves | None, outside: list[Leaves], plan: Schedule) -> Leaves:
  """What is new in the stages (None: they hold no layer), with what is new in the layers outside.

  Returns:
    {name: {path: [places, ...]}}.
  """

  def put(array: jax.Array, *groups: jax.Array) -> jax.Array:
    cut = array.reshape(plan.stages, plan.held, *array.shape[1:])
    for (place, count), group in zip(plan.groups(), groups, strict=True):
      cut = cut.at[:count, place].set(group.astype(array.dtype))
    return cut.reshape(array.shape)

  if staged is None:
    places = plan.stages * plan.held
    staged = jax.tree.map(lambda a: lax.full((places, *a.shape[1:]), 0, a.dtype), outside[0])
  return jax.tree.map(put, staged, *outside) if outside else staged

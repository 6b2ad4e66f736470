"""Arrays of a trial padded into those of a pack, and cut out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _parts
from peftlab.train.opt_state import OptState

Tree = Any


def pad(array: jax.Array, shape: Sequence[int]) -> jax.Array:
  """The array with zeros behind it in every dimension that is longer in `shape`."""
  if array.shape == tuple(shape):
    return array
  widths = [(0, n - m) for m, n in zip(array.shape, shape, strict=True)]
  return jnp.pad(array, widths)


def cut(array: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Inverse of `pad`."""
  return array[tuple(slice(n) for n in shape)]


def pad_tree(tree: Tree, like: Tree) -> Tree:
  """Every array of nested dicts padded to that of the same path in `like`, whose others stay."""
  own, all_ = _parts.flat(tree), _parts.flat(like)
  return _parts.nest({p: pad(own[p], a.shape) if p in own else a for p, a in all_.items()})


def cut_tree(tree: Tree, like: Tree) -> Tree:
  """Inverse of `pad_tree`, for the arrays that `like` has."""
  found = _parts.flat(tree)
  return _parts.nest({p: cut(found[p], a.shape) for p, a in _parts.flat(like).items()})


def pad_state(state: OptState, like: OptState) -> OptState:
  """An optimizer's state padded to another, whose arrays of the model's state fill the gaps."""
  inner = jax.tree.map(lambda a, b: pad(a, b.shape), state.inner, like.inner)
  filled = {**_parts.flat(like.state), **_parts.flat(state.state)}
  return dataclasses.replace(state, inner=inner, state=_parts.nest(filled))


def cut_state(state: OptState, like: OptState) -> OptState:
  """Inverse of `pad_state`."""
  inner = jax.tree.map(lambda a, b: cut(a, b.shape), state.inner, like.inner)
  found = _parts.flat(state.state)
  kept = {path: found[path] for path in _parts.flat(like.state)}
  return dataclasses.replace(state, inner=inner, state=_parts.nest(kept))


def lengths(tree: Tree, like: Tree) -> dict[str, np.ndarray]:
  """{path: its lengths int32 [dimensions]} of the arrays that are shorter than those of `like`."""
  own, whole = _parts.flat(tree), _parts.flat(like)
  return {
    _parts.path_name(path): np.array(array.shape, np.int32)
    for path, array in own.items()
    if array.shape != whole[path].shape
  }


def masked(tree: Tree, sizes: Mapping[str, jax.Array]) -> Tree:
  """Zeros beyond the `lengths` of a trial: what is padded gets no gradient."""

  def one(path: tuple, array: jax.Array) -> jax.Array:
    size = sizes.get(_parts.path_name(path))
    if size is None:
      return array
    for axis in range(array.ndim):
      places = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis)
      array = jnp.where(places < size[axis], array, jnp.zeros((), array.dtype))
    return array

  return _parts.nest({path: one(path, array) for path, array in _parts.flat(tree).items()})

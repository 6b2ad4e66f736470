"""Cuts a length into parts that follow each other, so that no part is too large for a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from peftlab import _specs


def count(length: int, each: int, most: int) -> int:
  """The fewest equal parts of `length` that hold at most `most`, at `each` per unit of length."""
  return -(-length // max(most // each, 1))


def cut(array: jax.Array, parts: int) -> jax.Array:
  """[batch, length, ...] -> [parts, batch, n, ...], zeros behind what n does not divide."""
  batch, length, *rest = array.shape
  size = -(-length // parts)
  padding = [(0, 0), (0, parts * size - length), *((0, 0) for _ in rest)]
  array = jnp.pad(array, padding) if parts * size > length else array
  return jnp.moveaxis(array.reshape(batch, parts, size, *rest), 1, 0)


def joined(array: jax.Array, length: int) -> jax.Array:
  """[parts, batch, n, ...] -> [batch, length, ...]: inverse of `cut`."""
  parts, batch, size, *rest = array.shape
  return jnp.moveaxis(array, 0, 1).reshape(batch, parts * size, *rest)[:, :length]


def pieces(shape: tuple[int, ...], axes: _specs.Axes) -> int:
  """Over how many devices of the mesh in context an activation with logical axes is cut."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1
  spec = _specs.spec_for(axes, mesh)
  return _specs.shards(_specs.fit_spec(shape, spec, mesh)[0], mesh)

"""Points: places in a model that have no weight, where an adapter may change a sequence."""

from __future__ import annotations

import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _kernel


class Point(nnx.Module):
  """A sequence on its way through a model, where an adapter may change it or put rows before it.

  It holds no array and without adapters does nothing. The module that owns it calls it with the
  sequence, and copes with one that comes back longer: what is new stands in front.

  A point lies behind a layer of the same module, which it knows by the name of the attribute. From
  there come the number of its features, how many layers are stacked, the devices on which an
  adapter's arrays lie, and for a slot with `needs_weight` the weight.

  Attributes:
    behind: name of the layer whose outputs the sequence is made of.
    role: the word that names such points, in `where` and for `Adapter.point`.
    factor: what the layer's outputs are multiplied by before they come here.
  """

  def __init__(self, behind: str, *, role: str, factor: float = 1.0):
    self.behind, self.role, self.factor = behind, role, factor

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, length, *features] -> [batch, length or more, *features]."""
    return x


def before(rows: jax.Array, x: jax.Array) -> jax.Array:
  """Rows [n, features], the same for every text, in front of x [batch, length, features]."""
  rows = jnp.broadcast_to(rows.astype(x.dtype), (*x.shape[:-2], *rows.shape))
  return jnp.concatenate([rows, x], axis=-2)


def added(x: Any, y: Any) -> int:
  """How many rows a point put before x [batch, length, ...], which came back as y."""
  count = y.shape[1] - x.shape[1] if len(x.shape) == len(y.shape) else -1
  if count < 0 or x.shape[:1] + x.shape[2:] != y.shape[:1] + y.shape[2:]:
    raise ValueError(
      f'A point made {y.shape} of a sequence {x.shape}; expected rows before it and no more.'
    )
  return count


def features(shape: tuple[int, ...]) -> int:
  """The features of a sequence [batch, length, *features] as one number."""
  return math.prod(shape[2:])


_kernel.register_point(Point)

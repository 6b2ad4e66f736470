"""A weight held in another form than its numbers (codes and scales): what the core asks of it."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp


class Packed(abc.ABC):
  """The value of one Variable that stands where a weight's array would; a pytree of arrays.

  Attributes:
    shape: of the weight, stack axes first. Every array inside has the stack axes first, too.
    dtype: that the weight had before.
    sharding: of the weight, as its arrays lie.
  """

  @property
  @abc.abstractmethod
  def shape(self) -> tuple[int, ...]:
    """The weight's shape, stack axes included."""

  @abc.abstractmethod
  def leaf_axes(self, axes: tuple) -> Any:
    """Something per dimension of the weight -> a tree like this one, each array's own tuple.

    Args:
      axes: a logical name, or an entry of a spec, per dimension of `shape`.
    """

  @abc.abstractmethod
  def matrix(self, dtype: Any = jnp.float32) -> jax.Array:
    """The kernel [in, out] of one layer, in numbers."""

  @abc.abstractmethod
  def dot(self, x: jax.Array, specs: Any = None) -> jax.Array:
    """x [..., in] times the kernel of one layer -> [..., out], in the dtype of x.

    Only x has a gradient, and nothing but the arrays of this weight is kept for it.

    Args:
      x: the input.
      specs: where the arrays are gathered to before they are read, see `_specs.use_specs`.
    """

  @abc.abstractmethod
  def rows(self, index: jax.Array, dtype: Any) -> jax.Array:
    """Rows [n, out] of the kernel of one layer at index [n] int, no other row being decoded."""

  @abc.abstractmethod
  def dense(self, dtype: Any = None) -> jax.Array:
    """The whole weight, stack axes included, in numbers of `dtype` (None: its own), as it lies."""

  @property
  def ndim(self) -> int:
    """Dimensions of the weight."""
    return len(self.shape)

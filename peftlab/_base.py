"""The frozen kernel as an adapter type sees it, and the plain ones of a matrix or a point."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from peftlab import _batch


class Base(Protocol):
  """The frozen kernel as an adapter's `apply` sees it."""

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [..., in] -> x W [..., out], without bias."""

  @property
  def shape(self) -> tuple[int, int]:
    """(in, out)."""
    ...

  def weight(self) -> jax.Array:
    """The kernel [in, out], dequantized if it was quantized, in the dtype of the layer's input."""

  def bias(self) -> jax.Array:
    """The layer's bias [out]; zeros where it has none."""

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    """x with dropout in training, x itself in eval."""

  @property
  def batch(self) -> _batch.Batch | _batch.Everywhere:
    """The tokens of the batch, of a type that says `reads_batch`."""


@dataclasses.dataclass
class PlainBase:
  """The `Base` of a matrix at hand, without dropout. Knows whether weight and batch were read.

  Attributes:
    matrix: [in, out].
    added: the bias [out], or None.
  """

  matrix: jax.Array
  added: jax.Array | None = None
  read: bool = False
  asked: bool = False

  @property
  def batch(self) -> _batch.Everywhere:
    """There are no texts: every row counts."""
    self.asked = True
    return _batch.EVERYWHERE

  @property
  def shape(self) -> tuple[int, int]:
    """(in, out)."""
    return self.matrix.shape[0], self.matrix.shape[1]

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [..., in] -> [..., out]."""
    return x @ self.matrix

  def weight(self) -> jax.Array:
    """The matrix."""
    self.read = True
    return self.matrix

  def bias(self) -> jax.Array:
    """The bias, or zeros."""
    return jnp.zeros(self.shape[1:], self.matrix.dtype) if self.added is None else self.added

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    """x itself."""
    del rate
    return x


@dataclasses.dataclass
class PointBase:
  """The `Base` at a point: there is no weight, and the sequence comes through as it is.

  Attributes:
    size: features of the sequence.
    key: of dropout; None: nothing is dropped.
  """

  size: int
  key: jax.Array | None = None

  @property
  def shape(self) -> tuple[int, int]:
    """(features, features)."""
    return self.size, self.size

  @property
  def batch(self) -> _batch.Batch | _batch.Everywhere:
    """Raises ValueError: a point sees no tokens."""
    raise ValueError('A point does not tell the tokens of its rows.')

  def __call__(self, x: jax.Array) -> jax.Array:
    """x itself."""
    return x

  def weight(self) -> jax.Array:
    """Raises ValueError."""
    raise ValueError('A point has no weight; a slot with `needs_weight` starts from one.')

  def bias(self) -> jax.Array:
    """Zeros [features]."""
    return jnp.zeros((self.size,))

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    """x with dropout in training."""
    return x if self.key is None else dropped(x, rate, self.key)


def dropped(x: jax.Array, rate: float | jax.Array, key: jax.Array) -> jax.Array:
  """x with each number zeroed with probability `rate`, the others larger for it."""
  keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
  return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))

"""One kernel [in, out] with the arrays of an adapter, outside of any model."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from peftlab import _adapter

SIZES = (12, 20)
TOKENS = 6


@dataclasses.dataclass(frozen=True)
class PlainBase:
  """The `Base` of a plain matrix: what `apply` sees in eval."""

  matrix: jax.Array

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [..., in] -> [..., out]."""
    return x @ self.matrix

  def weight(self) -> jax.Array:
    """The kernel [in, out]."""
    return self.matrix

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    """x itself."""
    del rate
    return x


@dataclasses.dataclass(frozen=True)
class Probe:
  """An adapter at one kernel.

  Attributes:
    x: [tokens, in] in float32.
    weight: [in, out] in float32.
    arrays: the adapter's arrays by slot, in their own dtypes.
  """

  adapter: _adapter.Adapter
  x: jax.Array
  weight: jax.Array
  arrays: Mapping[str, jax.Array]

  def apply(self, dtype: Any = jnp.float32, x: jax.Array | None = None) -> jax.Array:
    """y [..., out], everything in one dtype, as a layer does it."""
    x = self.x if x is None else x
    values = {n: a.astype(dtype) for n, a in self.arrays.items()}
    base = PlainBase(self.weight.astype(dtype))
    return self.adapter.apply(x.astype(dtype), base, _adapter.Values(values))

  def fuse(self) -> jax.Array:
    """The fused kernel [in, out]."""
    values = {n: a.astype(jnp.float32) for n, a in self.arrays.items()}
    return self.adapter.fuse(self.weight, _adapter.Values(values))


def slot_arrays(
  adapter: _adapter.Adapter, weight: jax.Array, key: jax.Array
) -> dict[str, jax.Array]:
  """First values of every slot for a kernel [in, out]."""
  sizes = {'in': weight.shape[0], 'out': weight.shape[1]}
  arrays = {}
  for index, (name, slot) in enumerate(adapter.slots().items()):
    shape = _adapter.slot_shape(slot, adapter, sizes=sizes)
    more = (weight,) if slot.needs_weight else ()
    arrays[name] = slot.init(jax.random.fold_in(key, index), shape, slot.dtype, *more)
  return arrays


def moved(
  arrays: Mapping[str, jax.Array], adapter: _adapter.Adapter, key: jax.Array, by: float = 0.1
) -> dict[str, jax.Array]:
  """The arrays with noise added to those that training moves."""
  slots = adapter.slots()
  keys = jax.random.split(key, len(arrays))
  return {
    name: add_noise(array, keys[i], by) if slots[name].trainable else array
    for i, (name, array) in enumerate(arrays.items())
  }


def add_noise(array: jax.Array, key: jax.Array, by: float) -> jax.Array:
  """The array + normal noise, in its dtype."""
  return array + (by * jax.random.normal(key, array.shape)).astype(array.dtype)


@functools.cache
def inputs(sizes: tuple[int, int] = SIZES) -> tuple[jax.Array, jax.Array]:
  """(x [tokens, in], weight [in, out])."""
  x, w = jax.random.split(jax.random.key(7))
  ins, outs = sizes
  return jax.random.normal(x, (TOKENS, ins)), jax.random.normal(w, (ins, outs)) * ins**-0.5


def probe(adapter: _adapter.Adapter, *, random: bool = True) -> Probe:
  """An adapter at a kernel of `SIZES`, with its first values or with random ones."""
  x, weight = inputs()
  arrays = slot_arrays(adapter, weight, jax.random.key(1))
  if random:
    arrays = moved(arrays, adapter, jax.random.key(2))
  return Probe(adapter, x, weight, arrays)

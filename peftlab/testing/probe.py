"""One kernel [in, out] with the arrays of an adapter, outside of any model."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter

SIZES = (12, 20)
TOKENS = 6
SEQUENCES = (2, 3)  # texts, tokens


PlainBase = _adapter.PlainBase


@dataclasses.dataclass(frozen=True)
class Probe:
  """An adapter at one kernel.

  Attributes:
    x: [tokens, in] in float32; of a type that goes on points [texts, tokens, out].
    weight: [in, out] in float32.
    bias: [out] in float32; `apply` leaves it to the layer to add.
    arrays: what `apply` gets, by slot, in their own dtypes.
  """

  adapter: _adapter.Adapter
  x: jax.Array
  weight: jax.Array
  bias: jax.Array
  arrays: Mapping[str, jax.Array]

  def apply(self, dtype: Any = jnp.float32, x: jax.Array | None = None) -> jax.Array:
    """y [..., out], everything in one dtype, as a layer does it."""
    x = self.x if x is None else x
    values = {n: as_seen(a, dtype) for n, a in self.arrays.items()}
    return self.adapter.apply(x.astype(dtype), self.base(dtype), _adapter.Values(values))

  def base(self, dtype: Any = jnp.float32) -> Any:
    """What `apply` gets for `base`."""
    if self.adapter.point:
      return _adapter.PointBase(self.weight.shape[1])
    return PlainBase(self.weight.astype(dtype), self.bias.astype(dtype))

  def fuse(self) -> jax.Array:
    """The fused kernel [in, out]."""
    return self.adapter.fuse(self.weight, self._values())

  def fuse_bias(self) -> jax.Array:
    """The fused bias [out]."""
    return self.adapter.fuse_bias(self.bias, self._values())

  def _values(self) -> _adapter.Values:
    return _adapter.Values({n: as_seen(a, jnp.float32) for n, a in self.arrays.items()})


def as_seen(array: jax.Array, dtype: Any) -> jax.Array:
  """An array in the dtype of the computation, but for integers."""
  return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.inexact) else array


def slot_arrays(
  adapter: _adapter.Adapter, weight: jax.Array, key: jax.Array, bias: jax.Array | None = None
) -> dict[str, jax.Array]:
  """First values of every slot for a kernel [in, out]."""
  slots, shapes = _adapter.slots_at(adapter, sizes={'in': weight.shape[0], 'out': weight.shape[1]})
  arrays = {}
  joint = {n: s for n, s in slots.items() if s.init is _adapter.together}
  if joint:
    given = (weight, weight) if any(s.needs_weight for s in joint.values()) else ()
    arrays = adapter.start(key, (weight.shape[0], weight.shape[1]), *given)
    arrays = {n: arrays[n].astype(joint[n].dtype) for n in joint}
  for index, (name, slot) in enumerate(slots.items()):
    if name in arrays:
      continue
    source = weight if slot.of == 'weight' else bias
    source = jnp.zeros(weight.shape[1:]) if source is None else source
    more = (source,) if slot.needs_weight else ()
    arrays[name] = slot.init(jax.random.fold_in(key, index), shapes[name], slot.dtype, *more)
  return {name: arrays[name] for name in slots}


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
  """The array + normal noise, in its dtype; made by numpy, which compiles nothing."""
  draw = np.random.default_rng(np.asarray(jax.random.key_data(key)))
  noise = by * draw.standard_normal(array.shape)
  return jnp.asarray((np.asarray(array, np.float64) + noise).astype(array.dtype))


@functools.cache
def inputs(sizes: tuple[int, int] = SIZES) -> tuple[jax.Array, jax.Array]:
  """(x [tokens, in], weight [in, out])."""
  x, w = jax.random.split(jax.random.key(7))
  ins, outs = sizes
  return jax.random.normal(x, (TOKENS, ins)), jax.random.normal(w, (ins, outs)) * ins**-0.5


def probe(adapter: _adapter.Adapter, *, random: bool = True) -> Probe:
  """An adapter at a kernel of `SIZES`, with its first values or with random ones."""
  x, weight = inputs()
  if adapter.point:
    x = jax.random.normal(jax.random.key(7), (*SEQUENCES, SIZES[1]))
  bias = jnp.linspace(-1.0, 1.0, weight.shape[1])
  arrays = slot_arrays(adapter, weight, jax.random.key(1), bias)
  if random:
    arrays = moved(arrays, adapter, jax.random.key(2))
  seen = {n: a for n, a in arrays.items() if not adapter.slots()[n].aside}
  return Probe(adapter, x, weight, bias, seen)

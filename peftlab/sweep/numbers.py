"""Number fields of an adapter as arrays, so that they may differ between trials of one program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter


def slot(name: str) -> str:
  """The name of the slot that holds a number field."""
  return f'number_{name}'


def value(number: float) -> np.float32:
  """A number in float32, to one last digit, such that 1 minus it is what 1 - number rounds to.

  A dropout rate is read as 1 - rate, and a last digit there would draw another mask. (Above 1/2 the
  difference may have more digits than any 1 - float32; then the nearest is taken.)
  """
  near, one = np.float32(number), np.float32(1)
  for found in (near, np.nextafter(near, one), np.nextafter(near, -one)):
    if one - found == np.float32(1 - number):
      return found
  return near


def held(number: float) -> np.ndarray:
  """A number as its slot holds it, [] uint32: the bits of the float32.

  A slot of floats would be cast to the dtype of the layer's input, and 0.1 in bfloat16 is another
  dropout rate than the 0.1 of a trial alone.
  """
  return np.asarray(value(number)).view(np.uint32)


def read(bits: jax.Array) -> jax.Array:
  """Inverse of `held`: a scalar that takes the dtype of what it meets, as a Python float does."""
  number = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jax.lax.full_like(1.0, number)  # weakly typed as the 1.0 is


def numbered(adapter: _adapter.Adapter, names: Sequence[str]) -> _adapter.Adapter:
  """The adapter with a further frozen slot for each of its number fields in `names`."""
  if not names:
    return adapter
  made = object.__new__(_numbered_class(type(adapter), tuple(names)))
  for field in dataclasses.fields(adapter):
    object.__setattr__(made, field.name, getattr(adapter, field.name))
  return made


@functools.cache
def _numbered_class(cls: type, names: tuple[str, ...]) -> type:
  """A subclass that reads the numbers from its slots; one per class and names."""

  def slots(self: Any) -> dict[str, _adapter.Slot]:
    return cls.slots(self) | {slot(n): _slot_of(getattr(self, n)) for n in names}  # pyrefly: ignore

  def own(self: Any, held_in: Mapping[str, jax.Array]) -> Any:
    """The adapter as it is alone, with the numbers of these arrays."""
    made = object.__new__(cls)
    for field in dataclasses.fields(self):
      object.__setattr__(made, field.name, getattr(self, field.name))
    for name in names:
      object.__setattr__(made, name, read(held_in[slot(name)]))
    return made

  def apply(self: Any, x: Any, base: Any, p: _adapter.Values) -> jax.Array:
    return own(self, p).apply(x, base, p)

  def penalty(self: Any, p: _adapter.Values) -> jax.Array | None:
    return own(self, p).penalty(p)

  def after_step(self: Any, kernels: Sequence[_adapter.Kernel], **when: Any) -> Any:
    first = {slot(n): kernels[0].values[slot(n)][0] for n in names}  # the same at every kernel
    return own(self, first).after_step(kernels, **when)

  methods: dict[str, Any] = {'slots': slots, 'apply': apply}
  for method in (penalty, after_step):  # what a type does not have, the step does not call
    if getattr(cls, method.__name__) is not getattr(_adapter.Adapter, method.__name__):
      methods[method.__name__] = method
  return type(f'Packed{cls.__name__}', (cls,), methods)


def _slot_of(number: float) -> _adapter.Slot:
  def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.full(shape, held(number), dtype)

  return _adapter.Slot(dims='', init=init, trainable=False, dtype=jnp.uint32)

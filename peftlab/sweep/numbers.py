"""Number fields of an adapter as arrays, so that they may differ between trials of one program."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from peftlab import _adapter


def slot(name: str) -> str:
  """The name of the slot that holds a number field."""
  return f'number_{name}'


def value(number: float) -> np.float32:
  """A number in float32; of a share, 1 minus it is what 1 minus the number rounds to.

  A dropout rate is read as 1 - rate, and a last digit there would draw another mask.
  """
  if 0 <= number <= 1:
    return np.float32(1) - np.float32(1 - number)
  return np.float32(number)


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
  """A subclass whose `apply` reads the numbers from its slots; one per class and names."""

  def slots(self: Any) -> dict[str, _adapter.Slot]:
    more = {
      slot(n): _adapter.Slot(
        dims='', init=_adapter.constant(float(value(getattr(self, n)))), trainable=False
      )
      for n in names
    }
    return cls.slots(self) | more  # pyrefly: ignore

  def apply(self: Any, x: Any, base: Any, p: _adapter.Values) -> jax.Array:
    own = object.__new__(cls)
    for field in dataclasses.fields(self):
      object.__setattr__(own, field.name, getattr(self, field.name))
    for name in names:
      object.__setattr__(own, name, p[slot(name)])
    return own.apply(x, base, p)  # pyrefly: ignore

  return type(f'Packed{cls.__name__}', (cls,), {'slots': slots, 'apply': apply})

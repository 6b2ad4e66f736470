"""Slots: one array of an adapter type in words, its first values, and the arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from peftlab import _registry

Init = Callable[..., jax.Array]


def zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Init of a slot with zeros."""
  del key
  return jnp.zeros(shape, dtype)


def copy(key: jax.Array, shape: tuple[int, ...], dtype: Any, weight: jax.Array) -> jax.Array:
  """Init of a slot with `needs_weight` that starts as a copy of the kernel (or of the bias)."""
  del key
  return weight.reshape(shape).astype(dtype)


def together(key: jax.Array, shape: tuple[int, ...], dtype: Any, *weight: jax.Array) -> jax.Array:
  """Init of slots whose first values `Adapter.start` makes at once: one SVD for four of them."""
  del key, shape, dtype, weight
  raise AssertionError('start makes it')


def constant(value: float) -> Init:
  """Init of a slot with one number, a scale for example."""
  return _Constant(float(value))


@dataclasses.dataclass(frozen=True)
class _Constant:
  """An init that compares equal to another of the same number, so that its program is shared."""

  value: float

  def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.full(shape, self.value, dtype)


def initial(default: Any, doc: str = '') -> Any:
  """A field that only feeds the initial values of slots: two values share one compiled program.

  `apply` and `fuse` must not read it; what they need of it is a slot (alpha -> the slot 'scale').
  """
  return dataclasses.field(default=default, compare=False, metadata={'doc': doc})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
  """One array of an adapter, for one kernel [in, out].

  Attributes:
    dims: a word per dimension, separated by spaces: 'in rank', 'rank out', 'out', '' (a scalar).
      'in' and 'out' are the kernel's sizes and take its spec; of a convolution in = 'channels' x
      'taps', the places in its window. Any other word is a field or property of the adapter that
      holds an int, a word of `Adapter.sizes`, or a number. 'in/block' is a quotient, which must
      come out even.
    init: `init(key, shape, dtype) -> array`; with `needs_weight`, `init(key, shape, dtype, weight)`
      where weight is the kernel [in, out] in float32, dequantized. `peftlab.together` leaves it to
      `Adapter.start`.
    needs_weight: the initial value is made from the kernel.
    trainable: False for a frozen part (a scale, a random projection).
    shared: one array for the whole model instead of one per kernel, as large as its largest kernel
      needs; every kernel sees the leading part of it that has its own shape.
    of: 'weight', or 'bias' for a slot that belongs to the layer's bias [out]: it is left out where
      a layer has none, and with `needs_weight` its init gets the bias.
    aside: what `Adapter.after_step` keeps from step to step; `apply` does not get it.
    saved: whether it goes into files; what does not is made anew where a file is loaded.
    role: what an optimizer may treat apart ('a', 'b', 'magnitude'); default: the slot's name.
    rate: factor of the learning rate, unless the optimizer is told another one for the role.
    dtype: dtype in memory; arithmetic is done in the dtype of the layer's input, but for integers.
  """

  dims: str
  init: Init = zeros
  needs_weight: bool = False
  trainable: bool = True
  shared: bool = False
  of: str = 'weight'
  aside: bool = False
  saved: bool = True
  role: str | None = None
  rate: float = 1.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    try:
      jnp.dtype(self.dtype)
    except TypeError:
      raise ValueError(
        f"A slot has dtype {self.dtype!r}; expected a dtype of numbers, such as 'float32'."
      ) from None
    if not (isinstance(self.rate, (int, float)) and 0 <= self.rate < math.inf):
      raise ValueError(f'A slot has rate {self.rate!r}; it must be a finite number, 0 or above.')


class Values(Mapping):
  """The arrays of one adapter at one kernel, by slot: `p.a` or `p['a']`. Knows what was read.

  Args:
    arrays: by slot.
    of: whose they are, for messages.
  """

  def __init__(self, arrays: Mapping[str, jax.Array], of: str = ''):
    self._arrays, self._of = dict(arrays), of
    self.read: set[str] = set()

  def __getitem__(self, name: str) -> jax.Array:
    if name not in self._arrays:
      near = _registry.did_you_mean(name, self._arrays)
      start = f'{self._of}: ' if self._of else ''
      raise ValueError(f'{start}No slot {name!r}{near or "."} Slots: {", ".join(self._arrays)}.')
    self.read.add(name)
    return self._arrays[name]

  def __getattr__(self, name: str) -> jax.Array:
    if name.startswith('_'):
      raise AttributeError(name)
    return self[name]

  def __contains__(self, name: object) -> bool:
    return name in self._arrays

  def __iter__(self) -> Iterator[str]:
    return iter(self._arrays)

  def __len__(self) -> int:
    return len(self._arrays)

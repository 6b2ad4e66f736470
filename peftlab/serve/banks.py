"""Banks: arrays with room for many adapters of one type and rank, written one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from peftlab import _adapter, _layer, _parts, _plan, _rows, _sites, _stack

_TRIAL = {'in': 48, 'out': 32}
_TOLERANCE = 1e-5
Arrays = dict[tuple, dict[str, Any]]  # {path of a layer: {slot: array}}


@dataclasses.dataclass(frozen=True)
class Key:
  """What adapters of one bank have in common, per layer: (path, adapter, its rank rounded up)."""

  adapters: tuple[tuple[tuple, _adapter.Adapter], ...]


@dataclasses.dataclass(frozen=True)
class Bank:
  """The arrays of a bank and which of its places are taken.

  Attributes:
    arrays: per layer and slot [capacity, layers, *own]; of a shared slot one [capacity, *own].
    taken: by place.
  """

  arrays: Arrays
  taken: tuple[bool, ...]

  @classmethod
  def empty(
    cls,
    key: Key,
    sites: Mapping[tuple, _sites.Site],
    like: Mapping[tuple, _layer.Attached],
    capacity: int,
  ) -> Bank:
    """Zeros.

    Args:
      key: of the bank.
      sites: of the base.
      like: an adapter of the bank: it has the slots, and the shapes of what is shared.
      capacity: how many places.
    """
    arrays: Arrays = {}
    shared: dict[str, jax.Array] = {}
    for path, adapter in key.adapters:
      site, arrays[path] = sites[path], {}
      plan = _plan.plan(site, adapter, 'bank')
      for name, slot in _kept(like[path]).items():
        if slot.shared:
          shape = _shared_shape(key, sites, name)
          if name not in shared:
            shared[name] = jnp.zeros((capacity, *shape), slot.dtype)
          arrays[path][name] = shared[name]
          continue
        own = _adapter.slot_shape(slot, adapter, sizes=site.sizes)
        where = _sharding(plan.shardings[name], plan.stacks[name], len(own))
        whole = (capacity, math.prod(site.layers), *own)
        arrays[path][name] = jnp.zeros(whole, slot.dtype, device=where)
    return cls(arrays, (False,) * capacity)

  @property
  def used(self) -> int:
    """How many places are taken."""
    return sum(self.taken)

  def free(self) -> int | None:
    """A place that is not taken, or None."""
    return None if all(self.taken) else self.taken.index(False)

  def put(self, place: int, arrays: Arrays) -> Bank:
    """The bank with an adapter at a place; the arrays of this one are used up."""
    written: dict[int, jax.Array] = {}
    new: Arrays = {}
    for path, slots in self.arrays.items():
      new[path] = {}
      for name, bank in slots.items():
        if id(bank) not in written:
          value = padded(arrays[path][name], bank.shape[1:])
          written[id(bank)] = _write(bank, np.int32(place), value.astype(bank.dtype))
        new[path][name] = written[id(bank)]
    return Bank(new, _with(self.taken, place, True))

  def cleared(self, place: int) -> Bank:
    """The bank with a place free; what is there stays until it is written over."""
    return Bank(self.arrays, _with(self.taken, place, False))

  def at(
    self, path: tuple, adapter: _adapter.Adapter, site: _sites.Site, plan: _rows.RowPlan
  ) -> _rows.Bank:
    """What a layer carries."""
    number = jnp.arange(math.prod(site.layers), dtype=jnp.int32).reshape(site.layers)
    stack = tuple(range(len(site.layers)))
    return _rows.Bank(adapter, self.arrays[path], number, plan, stack=stack)

  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return _parts.nbytes(self.arrays)


@functools.partial(jax.jit, donate_argnums=0)
def _write(bank: jax.Array, place: Any, value: Any) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(bank, value, place, 0)


def _with(taken: tuple[bool, ...], place: int, value: bool) -> tuple[bool, ...]:
  return (*taken[:place], value, *taken[place + 1 :])


def _kept(attached: _layer.Attached) -> dict[str, _adapter.Slot]:
  """The slots that a forward pass reads."""
  return {name: slot for name, slot in attached.slots().items() if not slot.aside}


def _shared_shape(key: Key, sites: Mapping[tuple, _sites.Site], name: str) -> tuple[int, ...]:
  """The shape of a shared slot: the largest that a layer needs."""
  shapes = [
    _adapter.slot_shape(a.slots()[name], a, sizes=sites[path].sizes)
    for path, a in key.adapters
    if name in a.slots()
  ]
  return tuple(map(max, zip(*shapes, strict=True)))


def _sharding(placed: Any, stack: tuple[int, ...], rank: int) -> Any:
  """Of a slot of a stack -> of [capacity, layers, *own]."""
  if not isinstance(placed, NamedSharding):
    return placed
  entries = [*placed.spec, *(None,) * (rank + len(stack) - len(placed.spec))]
  own = [entry for i, entry in enumerate(entries) if i not in stack]
  return NamedSharding(placed.mesh, PartitionSpec(None, None, *own))


def host_arrays(site: _sites.Site, attached: _layer.Attached) -> dict[str, np.ndarray]:
  """{slot: [layers, *own]} of an adapter at a layer, of a shared slot the whole array."""
  found = {}
  for name, slot in _kept(attached).items():
    array = np.asarray(jax.device_get(getattr(attached, name)[...]))
    if not slot.shared:
      stack = _stack.place_axes(site.stack, array.ndim - len(site.stack))
      array = np.moveaxis(array, stack, range(len(stack)))
      array = array.reshape(-1, *array.shape[len(stack) :])
    found[name] = array
  return found


def padded(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
  """The array with zeros behind it in every dimension that is longer in `shape`."""
  if array.shape == tuple(shape):
    return array
  widths = [(0, n - m) for m, n in zip(array.shape, shape, strict=True)]
  return np.pad(array, widths)


def round_up(adapter: _adapter.Adapter, ranks: Sequence[int]) -> _adapter.Adapter:
  """The adapter of the next rank, where it has a rank and zeros can fill the rest; else itself.

  Dropout, which serving does not draw, is taken off.
  """
  named = {field.name for field in dataclasses.fields(adapter)}
  if adapter.stochastic and 'dropout' in named:
    adapter = _with_field(adapter, 'dropout', 0.0)
  rank = getattr(adapter, 'rank', None)
  if 'rank' not in named or not isinstance(rank, int):
    return adapter
  higher = [n for n in ranks if n >= rank]
  if not higher or higher[0] == rank or not bears_zeros(adapter):
    return adapter
  return _with_field(adapter, 'rank', higher[0])


def _with_field(adapter: _adapter.Adapter, field: str, value: Any) -> _adapter.Adapter:
  new: dict[str, Any] = {field: value}
  return dataclasses.replace(adapter, **new)


def bears_zeros(adapter: _adapter.Adapter) -> bool:
  """Whether an adapter whose arrays are padded to another rank by zeros still does the same."""
  try:
    return _bears_zeros(_with_field(adapter, 'rank', 2), _with_field(adapter, 'rank', 4))
  except ValueError:  # it has other sizes than these
    return False


@functools.lru_cache(maxsize=256)
def _bears_zeros(adapter: _adapter.Adapter, larger: _adapter.Adapter) -> bool:
  own, more = (_adapter.slots_at(a, sizes=_TRIAL)[1] for a in (adapter, larger))
  if own.keys() != more.keys() or any(len(own[n]) != len(more[n]) for n in own):
    return False
  if any(m > n for name in own for m, n in zip(own[name], more[name], strict=True)):
    return False
  generator = np.random.default_rng(0)
  dtypes = {name: slot.dtype for name, slot in adapter.slots().items()}
  values = {n: np.asarray(generator.standard_normal(s)).astype(dtypes[n]) for n, s in own.items()}
  outputs = [
    _output(a, {n: padded(v, shapes[n]) for n, v in values.items()})
    for a, shapes in ((adapter, own), (larger, more))
  ]
  scale = float(np.abs(outputs[0]).max())
  return bool(np.abs(outputs[0] - outputs[1]).max() <= _TOLERANCE * scale)


def _output(adapter: _adapter.Adapter, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  generator = np.random.default_rng(1)
  x, w = (generator.standard_normal(s).astype(np.float32) for s in ((3, 48), (48, 32)))

  def run(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    base: Any = _adapter.PlainBase(w)
    return adapter.apply(x, base, _adapter.Values(arrays))

  return np.asarray(jax.jit(run)(x, w, dict(arrays)))

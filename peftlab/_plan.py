"""Plans: what a site gets from an adapter type, checked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _adapter, _layer, _sites, _specs, _stack


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one site gets: the shape, dtype and sharding of every slot."""

  site: _sites.Site
  slots: dict[str, _adapter.Slot]
  shapes: dict[str, tuple[int, ...]]
  stacks: dict[str, tuple[int, ...]]
  shardings: dict[str, Any]
  dropped: list[_specs.Dropped]


def plan(site: _sites.Site, adapter: _adapter.Adapter, name: str) -> Plan:
  if any(attached.name == name for attached in getattr(site.layer, 'adapters', ())):
    raise ValueError(f'{site.name} already has an adapter named {name!r}; detach it first.')
  if not site.kind.linear and not adapter.embeddings:
    raise ValueError(f'{type(adapter).__name__} does not work on the embedding {site.name}.')
  slots = adapter.slots()
  _check_slots(slots, adapter)
  shapes, stacks, shardings, dropped = {}, {}, {}, []
  for slot_name, slot in slots.items():
    own = _adapter.slot_shape(slot, adapter, sizes=site.sizes)
    stack = _stack.place_axes(site.stack, len(own))
    shapes[slot_name] = _stack.insert(own, stack, site.layers)
    stacks[slot_name] = stack
    shardings[slot_name], lost = _sharding(site, slot, own, stack)
    path = f'{site.name}.adapters.{name}.{slot_name}'
    dropped += [dataclasses.replace(d, path=path) for d in lost]
  _check_apply(site, adapter, slots)
  rank, full = getattr(adapter, 'rank', 0), min(site.sizes.values())
  if isinstance(rank, int) and rank > full:
    warnings.warn(f'{site.name}: rank {rank} is more than full rank, {full}.', stacklevel=3)
  return Plan(site, slots, shapes, stacks, shardings, dropped)


def _check_slots(slots: Mapping[str, _adapter.Slot], adapter: _adapter.Adapter) -> None:
  kind = type(adapter).__name__
  if not slots:
    raise ValueError(f'{kind}.slots() is empty: the adapter has no array.')
  for name, slot in slots.items():
    if not isinstance(slot, _adapter.Slot):
      raise ValueError(f'{kind}.slots()[{name!r}] must be a Slot, given {type(slot).__name__}.')
    if slot.shared:
      raise ValueError(f'{kind} shares slot {name!r}; shared slots are not there yet.')
    taken = name in _layer.RESERVED or hasattr(_layer.Attached, name) or hasattr(dict, name)
    if taken or not name.isidentifier():
      raise ValueError(f'{kind} cannot name a slot {name!r}; that word is taken.')


def _check_apply(
  site: _sites.Site, adapter: _adapter.Adapter, slots: Mapping[str, _adapter.Slot]
) -> None:
  """Runs `apply` on shapes: every slot is read, and [tokens, in] becomes [tokens, out]."""
  if site.layout.equation is None:
    return
  sizes = site.sizes
  shape = functools.partial(_adapter.slot_shape, adapter=adapter, sizes=sizes)
  read = _read_slots(
    adapter, sizes['in'], sizes['out'], tuple((n, shape(s)) for n, s in slots.items())
  )
  unread = [n for n in slots if n not in read]
  if unread:
    raise ValueError(
      f'{type(adapter).__name__} has slots that apply never reads: {", ".join(unread)}.'
    )


def _read_slots(
  adapter: _adapter.Adapter, ins: int, outs: int, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> set[str]:
  read: set[str] = set()

  def run(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    values = _adapter.Values(arrays)
    y = adapter.apply(x, _PlainBase(w), values)
    read.update(values.read)
    return y

  spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  arrays = {name: spec(shape) for name, shape in shapes}
  y = jax.eval_shape(run, spec((3, ins)), spec((ins, outs)), arrays)
  if y.shape != (3, outs):
    raise ValueError(
      f'{type(adapter).__name__}.apply gave shape {y.shape} for x (3, {ins}) and a kernel '
      f'({ins}, {outs}); expected (3, {outs}).'
    )
  return read


class _PlainBase:
  """The `Base` of a kernel at hand."""

  def __init__(self, w: jax.Array):
    self._w = w

  def __call__(self, x: jax.Array) -> jax.Array:
    return x @ self._w

  def weight(self) -> jax.Array:
    return self._w

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    del rate
    return x


def _sharding(
  site: _sites.Site, slot: _adapter.Slot, shape: tuple[int, ...], stack: tuple[int, ...]
) -> tuple[Any, list[_specs.Dropped]]:
  placed = jax.tree.leaves(site.weight.get_raw_value())[0].sharding
  if not isinstance(placed, NamedSharding):
    return placed, []
  mesh = placed.mesh
  wanted = placed.spec.partitions
  full = wanted + (None,) * (len(site.stack) + len(site.shape) - len(wanted))
  own = [e for i, e in enumerate(full) if i not in site.stack]
  kernel = {
    word: tuple(
      a
      for w, e in zip(site.layout.words, own, strict=True)
      if w == word
      for a in _specs.entry_axes(e)
    )
    for word in ('in', 'out')
  }
  spec, dropped = _specs.factor_spec(slot.dims.split(), shape, kernel, mesh)
  entries = _stack.insert(tuple(spec), stack, tuple(full[i] for i in site.stack))
  whole = PartitionSpec(*entries)
  array = jax.ShapeDtypeStruct(_stack.insert(shape, stack, site.layers), slot.dtype)
  return NamedSharding(mesh, whole), _specs.priced(dropped, '', array, whole, mesh)

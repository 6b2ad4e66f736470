"""Plans: what a site gets from an adapter type, checked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _adapter, _kernel, _layer, _packed, _padded, _points, _sites, _specs, _stack


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one site gets: the shape, dtype and sharding of every slot.

  `stored` has the shape in memory of those that are padded, see `_padded`.
  """

  site: _sites.Site
  adapter: _adapter.Adapter
  slots: dict[str, _adapter.Slot]
  shapes: dict[str, tuple[int, ...]]
  stacks: dict[str, tuple[int, ...]]
  shardings: dict[str, Any]
  dropped: list[_specs.Dropped]
  stored: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def plan(site: _sites.Site, adapter: _adapter.Adapter, name: str, *, pad: bool = False) -> Plan:
  """What `site` gets from an adapter of that name.

  With `pad` a dimension that a mesh axis does not divide is stored padded.

  Raises:
    ValueError: the name is taken there, or a slot does not fit the kernel.
  """
  if any(attached.name == name for attached in getattr(site.layer, 'adapters', ())):
    raise ValueError(f'{site.name} already has an adapter named {name!r}; detach it first.')
  if not _sites.goes_on(adapter, site):
    raise ValueError(_sites.wrong_kind(site, [adapter]))
  if site.kind.norm and not adapter.norms:
    raise ValueError(f'{type(adapter).__name__} does not work on the norm {site.name}.')
  weighed = not site.kind.point
  if weighed and not site.kind.linear and not site.kind.norm and not adapter.embeddings:
    raise ValueError(f'{type(adapter).__name__} does not work on the embedding {site.name}.')
  held = site.weight.get_raw_value()
  for claim, meets in (
    ('conv', site.kind.linear and site.layout.equation is None),
    ('experts', site.experts),
    ('quantized_base', weighed and isinstance(held, _packed.Packed)),
  ):
    if meets and not getattr(adapter, claim):
      raise ValueError(f'{type(adapter).__name__} says {claim} = False, so not on {site.name}.')
  if min(site.sizes.values()) < 1:
    raise ValueError(
      f'{site.name} has a kernel [in {site.sizes["in"]}, out {site.sizes["out"]}]; an adapter '
      'needs at least 1 of each.'
    )
  with _adapter.noted(adapter, 'slots', f'layer {site.name}'):
    given = adapter.slots()
  _check_slots(given, adapter, site.name)
  slots, own_shapes = _slots_at(site, adapter)
  if not slots and any(slot.of == 'bias' for slot in given.values()):
    raise ValueError(f'{site.name} has no bias, and {type(adapter).__name__} adapts nothing else.')
  if not slots:
    raise ValueError(
      f'{type(adapter).__name__} has no slot at {site.name}, a kernel [in {site.sizes["in"]}, out '
      f'{site.sizes["out"]}]: a size of each is 0.'
    )
  _check_one(site, adapter, slots)
  shapes, stacks, shardings, stored, dropped = {}, {}, {}, {}, []
  for slot_name, slot in slots.items():
    own = own_shapes[slot_name]
    stack = site.own_stack(len(own))
    shapes[slot_name] = _stack.insert(own, stack, site.own_layers)
    stacks[slot_name] = stack
    wide, shardings[slot_name], lost = _sharding(site, slot, own, stack, pad=pad)
    if wide != own:
      stored[slot_name] = _stack.insert(wide, stack, site.own_layers)
    path = f'{site.name}.adapters.{name}.{slot_name}'
    dropped += [dataclasses.replace(d, path=path) for d in lost]
  _check_apply(site, adapter, {n: s for n, s in slots.items() if not s.aside})
  return Plan(site, adapter, slots, shapes, stacks, shardings, dropped, stored)


def _check_one(
  site: _sites.Site, adapter: _adapter.Adapter, slots: Mapping[str, _adapter.Slot]
) -> None:
  """Raises ValueError where all experts would share what starts from the kernel of one of them."""
  from_weight = [name for name, slot in slots.items() if slot.needs_weight]
  if site.one and from_weight:
    raise ValueError(
      f'{type(adapter).__name__} makes {", ".join(from_weight)} from the weight of each expert, so '
      f"the experts of {site.name} cannot share one; expected experts='each' there."
    )


def _slots_at(
  site: _sites.Site, adapter: _adapter.Adapter
) -> tuple[dict[str, _adapter.Slot], dict[str, tuple[int, ...]]]:
  try:
    return _adapter.slots_at(adapter, sizes=site.sizes, bias=site.bias is not None)
  except ValueError as error:
    raise ValueError(f'{str(error).rstrip(".")} (layer {site.name}).') from None


def share(plans: Sequence[Plan], held: Mapping[tuple, tuple[int, ...]]) -> list[Plan]:
  """The plans with one shape for every shared slot: the largest that a site needs.

  Args:
    plans: of all sites of one name.
    held: {(adapter, slot): shape} of shared arrays that the model has under this name already.

  Raises:
    ValueError: a site needs more of a shared array than the model has of it.
  """
  needed = {key: [shape] for key, shape in held.items()}
  for p in plans:
    for name in shared(p.slots):
      own = _adapter.slot_shape(p.slots[name], p.adapter, sizes=p.site.sizes)
      needed.setdefault((p.adapter, name), []).append(own)
  whole = {key: tuple(map(max, zip(*shapes, strict=True))) for key, shapes in needed.items()}
  for (adapter, name), shape in held.items():
    if whole[adapter, name] != shape:
      raise ValueError(
        f'The shared slot {name!r} of {type(adapter).__name__} has shape {shape} in this model, '
        f'and these layers need {whole[adapter, name]}; attach to all layers at once.'
      )
  return [_shared(p, {n: whole[p.adapter, n] for n in shared(p.slots)}) for p in plans]


def shared(slots: Mapping[str, _adapter.Slot]) -> list[str]:
  """The names of the shared slots."""
  return [name for name, slot in slots.items() if slot.shared]


def _shared(p: Plan, shapes: dict[str, tuple[int, ...]]) -> Plan:
  if not shapes:
    return p
  placed = jax.tree.leaves(p.site.weight.get_raw_value())[0].sharding
  if isinstance(placed, NamedSharding):
    placed = NamedSharding(placed.mesh, PartitionSpec())
  return dataclasses.replace(
    p,
    shapes=p.shapes | shapes,
    stacks=p.stacks | dict.fromkeys(shapes, ()),
    shardings=p.shardings | dict.fromkeys(shapes, placed),
    stored={n: shape for n, shape in p.stored.items() if n not in shapes},
    dropped=[d for d in p.dropped if d.path.rpartition('.')[2] not in shapes],
  )


def warn_of_ranks(plans: Sequence[Plan]) -> None:
  """One warning per rank that names the layers whose full rank is below it."""
  ranks = {p.site.name: getattr(p.adapter, 'rank', 0) for p in plans}
  full = {p.site.name: p.site.full_rank for p in plans}
  for rank in sorted({r for r in ranks.values() if isinstance(r, int)}):
    low = [f'{name} ({n})' for name, n in full.items() if ranks[name] == rank and rank > n]
    if not low:
      continue
    shown = ', '.join(low[:6]) + (f' and {len(low) - 6} more' if len(low) > 6 else '')
    warnings.warn(f'Rank {rank} is more than the full rank of {shown}.', stacklevel=3)


def warn_of_starts(plans: Sequence[Plan]) -> None:
  """One warning per type that another function than `attach` gives its first values."""
  for kind in dict.fromkeys(type(p.adapter) for p in plans):
    if kind.started_by:
      warnings.warn(
        f'{kind.__name__} is attached without its own first values; {kind.started_by} makes them.',
        stacklevel=3,
      )


def _check_slots(slots: Any, adapter: _adapter.Adapter, layer: str) -> None:
  kind = type(adapter).__name__
  if not isinstance(slots, Mapping):
    given = type(slots).__name__
    raise ValueError(f'{kind}.slots() must be {{name: Slot}}, given {given} (layer {layer}).')
  if not slots:
    raise ValueError(f'{kind}.slots() is empty: the adapter has no array.')
  for name, slot in slots.items():
    if not isinstance(slot, _adapter.Slot):
      raise ValueError(f'{kind}.slots()[{name!r}] must be a Slot, given {type(slot).__name__}.')
    for attribute, expected, fits in (
      ('dims', "a word per dimension, 'in rank' for example", isinstance(slot.dims, str)),
      ('init', 'a function init(key, shape, dtype)', callable(slot.init)),
    ):
      if not fits:
        raise ValueError(
          f'{kind} has a slot {name!r} with {attribute}={getattr(slot, attribute)!r}; expected '
          f'{expected} (layer {layer}).'
        )
    if slot.shared and (slot.needs_weight or slot.of != 'weight' or slot.init is _adapter.together):
      raise ValueError(f'{kind} shares slot {name!r}, so it cannot start from one kernel.')
    if slot.aside and slot.trainable:
      raise ValueError(f'{kind} keeps slot {name!r} aside, so it cannot be trainable.')
    if slot.of not in ('weight', 'bias'):
      raise ValueError(f"{kind} has a slot {name!r} of {slot.of!r}; expected 'weight' or 'bias'.")
    word = str(name)
    taken = word in _layer.RESERVED or hasattr(_layer.Attached, word) or hasattr(dict, word)
    if word != name or not word.isidentifier():
      raise ValueError(f'{kind} cannot name a slot {name!r}; expected a name as of a variable.')
    if taken:
      raise ValueError(f'{kind} cannot name a slot {name!r}; that word is taken.')


def _check_apply(
  site: _sites.Site, adapter: _adapter.Adapter, slots: Mapping[str, _adapter.Slot]
) -> None:
  """Runs `apply` on shapes: every slot is read, and [tokens, in] becomes [tokens, out]."""
  if site.layout.equation is None and not site.kind.point:
    return
  shape = functools.partial(_adapter.slot_shape, adapter=adapter, sizes=site.sizes)
  read = _read_slots(adapter, site, tuple((n, shape(s)) for n, s in slots.items()))
  unread = [n for n in slots if n not in read]
  if unread:
    raise ValueError(
      f'{type(adapter).__name__} has slots that apply never reads: {", ".join(unread)}.'
    )


def _read_slots(
  adapter: _adapter.Adapter, site: _sites.Site, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> set[str]:
  read: set[str] = set()
  ins, outs, kind = site.sizes['in'], site.sizes['out'], type(adapter).__name__

  def run(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    values = _adapter.Values(arrays, f'{kind} (layer {site.name})')
    base = _adapter.PointBase(outs) if adapter.point else _adapter.PlainBase(w)
    y = adapter.apply(x, base, values)
    read.update(values.read)
    return y

  spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  dtypes = {name: slot.dtype for name, slot in adapter.slots().items()}
  arrays = {n: spec(shape, dtype=_as_seen(dtypes[n])) for n, shape in shapes}
  x = spec((2, 3, outs) if adapter.point else (3, ins))
  with _adapter.noted(adapter, 'apply', f'layer {site.name}'):
    y = jax.eval_shape(run, x, spec((ins, outs)), arrays)
  if not isinstance(y, jax.ShapeDtypeStruct) or y.dtype != x.dtype:
    given = f'an array of {y.dtype}' if isinstance(y, jax.ShapeDtypeStruct) else type(y).__name__
    raise ValueError(
      f'{kind}.apply gave {given} at layer {site.name}; expected an array of {x.dtype}, as x is.'
    )
  if adapter.point:
    try:
      _points.added(x, y)
    except ValueError as error:
      raise ValueError(f'{kind}.apply at {site.name}: {error}') from None
  elif y.shape != (3, outs):
    raise ValueError(
      f'{kind}.apply gave shape {y.shape} for x (3, {ins}) and a kernel ({ins}, {outs}); expected '
      f'(3, {outs}) (layer {site.name}).'
    )
  return read


def _as_seen(dtype: Any) -> Any:
  return jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _sharding(
  site: _sites.Site,
  slot: _adapter.Slot,
  shape: tuple[int, ...],
  stack: tuple[int, ...],
  *,
  pad: bool,
) -> tuple[tuple[int, ...], Any, list[_specs.Dropped]]:
  """(the shape stored for one layer, where the array goes, what was dropped)."""
  placed = site.weight.get_raw_value().sharding
  if not isinstance(placed, NamedSharding):
    return shape, placed, []
  mesh = placed.mesh
  full = _kernel_entries(site, placed)
  own = [e for i, e in enumerate(full) if i not in site.stack]
  sides = {'in': _kernel.INPUTS, 'out': ('out',), 'channels': ('in',)}
  kernel = {
    word: tuple(
      a
      for w, e in zip(site.layout.words, own, strict=True)
      if w in side
      for a in _specs.entry_axes(e)
    )
    for word, side in sides.items()
  }
  words = slot.dims.split()
  kernel |= {w: kernel[w.partition('/')[0]] for w in words if w.startswith(('in/', 'out/'))}
  wanted, stored = _specs.factor_spec(words, kernel), shape
  if pad and stack == tuple(range(len(stack))):
    spec, stored, dropped = _padded.pad_spec(shape, wanted, mesh)
  else:
    spec, dropped = _specs.fit_spec(shape, wanted, mesh)
  at = [i for i in range(len(shape) + len(stack)) if i not in stack]  # where each lies in the array
  dropped = [dataclasses.replace(d, dim=at[d.dim]) for d in dropped]
  entries = _stack.insert(tuple(spec), stack, tuple(full[i] for i in site.stack[: len(stack)]))
  whole = PartitionSpec(*entries)
  array = jax.ShapeDtypeStruct(_stack.insert(shape, stack, site.own_layers), slot.dtype)
  return stored, NamedSharding(mesh, whole), _specs.priced(dropped, '', array, whole, mesh)


def _kernel_entries(site: _sites.Site, placed: NamedSharding) -> tuple:
  """The spec of a kernel, an entry per dimension: as it lies, and as its logical axes say.

  Codes and scales lie on what divides them, tiles for example, which says nothing of the kernel:
  where they have lost an axis, the kernel's own sizes decide.
  """
  variable, rank = site.weight, len(site.stack) + len(site.shape)
  lies = placed.spec.partitions + (None,) * (rank - len(placed.spec.partitions))
  value: Any = variable.get_raw_value()
  axes = _specs.axes_of(variable, value.shape, site.name)
  if axes is None or not isinstance(value, _packed.Packed):
    return lies
  said, _ = _specs.fit_spec(value.shape, _specs.spec_for(axes, placed.mesh), placed.mesh)
  used = {axis for entry in lies for axis in _specs.entry_axes(entry)}
  return tuple(
    theirs if own is None and used.isdisjoint(_specs.entry_axes(theirs)) else own
    for own, theirs in zip(lies, said, strict=True)
  )

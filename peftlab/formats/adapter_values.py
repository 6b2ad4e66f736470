"""The arrays of an adapter by layer name: taken from a model, and put together for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _initial, _layer, _plan, _sites
from peftlab.formats import layer_names

# {layer name: {slot: array of one layer}}; under '' the arrays that all layers share
Values = dict[str, dict[str, np.ndarray]]


def collect(model: nnx.Module, name: str) -> tuple[dict[str, _adapter.Adapter], Values, set[str]]:
  """(the adapter of every layer, the arrays of every layer, which layers are embeddings).

  Raises:
    ValueError: several adapters of that name have shared arrays.
  """
  adapters: dict[str, _adapter.Adapter] = {}
  values: Values = {}
  embeddings = set()
  sharing = set()
  whole: dict[tuple, dict[str, np.ndarray]] = {}
  for place in layer_names.places(model).values():
    site = place.site
    attached = next((a for a in getattr(site.layer, 'adapters', ()) if a.name == name), None)
    if attached is None:
      continue
    if site.path not in whole:
      whole[site.path] = _host_arrays(attached)
    layer = place.hf_name or place.name
    adapters[layer] = attached.adapter
    shared = _plan.shared(attached.slots())
    values[layer] = {
      slot: layer_names.take(array, _stack_of(attached, slot), place.index)
      for slot, array in whole[site.path].items()
      if slot not in shared and attached.slots()[slot].saved
    }
    if shared:
      sharing.add(attached.adapter)
      values[''] = {slot: whole[site.path][slot] for slot in shared}
    if not site.kind.linear:
      embeddings.add(layer)
  if len(sharing) > 1:
    raise ValueError(f'Adapter {name!r} has several types that share arrays; name them apart.')
  return adapters, values, embeddings


def _host_arrays(attached: _layer.Attached) -> dict[str, np.ndarray]:
  slots = attached.slots()
  return {slot: np.asarray(jax.device_get(getattr(attached, slot)[...])) for slot in slots}


def _stack_of(attached: _layer.Attached, slot: str) -> tuple[int, ...]:
  return getattr(attached, slot).get_metadata().get('stack', ())


def plans_and_arrays(
  model: nnx.Module,
  name: str,
  values: Values,
  adapters: Mapping[str, _adapter.Adapter],
  *,
  known: dict[layer_names.Key, layer_names.Place],
  subject: str,
) -> tuple[list[_plan.Plan], dict[str, dict[str, Any]], list[layer_names.Place]]:
  """What `install` takes, and the layers that it is for.

  Args:
    model: gets the adapter.
    name: of it there.
    values: of a file, by layer.
    adapters: likewise.
    known: the layers of the base.
    subject: the start of every message.
  """
  shared = values.get('', {})
  values = {layer: slots for layer, slots in values.items() if layer}
  placed = _placed(values, known, subject)
  kinds = {
    layer_names.canonical(layer_names.find(known, layer).name): kind
    for layer, kind in adapters.items()
  }
  fresh = {site.path: site for site in _sites.sites(model, norms=True)}
  plans, arrays = [], {}
  for site, each in layer_names.by_site(placed, known):
    own = {kinds[key] for key in placed if known[key].site.path == site.path}
    if len(own) != 1:
      raise ValueError(f'{subject} has several adapters in one stack, {site.name}: {own}.')
    plans.append(_plan.plan(fresh[site.path], own.pop(), name))
    arrays[site.name] = _stacked(plans[-1], each, subject)
  plans = _plan.share(plans, {})
  for plan in [p for p in plans if _plan.shared(p.slots)][:1]:  # install takes them for every layer
    arrays[plan.site.name] |= _shared(plan, shared, subject)
    shared = {}
  if shared:
    raise ValueError(f'{subject} has shared arrays {sorted(shared)}, which no layer takes.')
  if any(not slot.saved for plan in plans for slot in plan.slots.values()):
    made = _initial.initial_values(plans, jax.random.key(0))
    arrays = {layer: made[layer] | own for layer, own in arrays.items()}
  return plans, arrays, [known[key] for key in placed]


def _placed(values: Values, known: dict, subject: str) -> dict[layer_names.Key, dict]:
  """The layers of the file by canonical name, every stack they touch complete."""
  placed = {}
  try:
    for layer, slots in values.items():
      place = layer_names.find(known, layer)
      placed[layer_names.canonical(place.name)] = slots
  except ValueError as error:
    raise ValueError(f'{subject}: {error}') from None
  touched = {known[key].site.path for key in placed}
  wanted = [key for key, place in known.items() if place.site.path in touched]
  missing = [known[key].name for key in wanted if key not in placed]
  if missing:
    raise ValueError(
      f'{subject} has {len(placed)} of {len(wanted)} layers; missing: {", ".join(missing[:6])}. '
      'A stack takes an adapter on all of its layers.'
    )
  return placed


def _stacked(plan: _plan.Plan, each: dict[tuple, dict], subject: str) -> dict[str, jax.Array]:
  arrays = {}
  expected = {n for n, s in plan.slots.items() if s.saved and not s.shared}
  for slot in expected:
    shape, stack = plan.shapes[slot], plan.stacks[slot]
    own = tuple(s for i, s in enumerate(shape) if i not in stack)
    layers = {}
    for index, slots in each.items():
      where = f'{subject}: {plan.site.name}{list(index) or ""}'
      if set(slots) != expected:
        raise ValueError(f'{where} has slots {sorted(slots)}; expected {sorted(expected)}.')
      if slots[slot].shape != own:
        raise ValueError(f'{where}.{slot} has shape {slots[slot].shape}; expected {own}.')
      layers[index] = slots[slot]
    whole = layer_names.put_together(layers, stack, plan.site.layers)
    dtype = plan.slots[slot].dtype
    arrays[slot] = jax.device_put(jnp.asarray(whole, dtype), plan.shardings[slot])
  return arrays


def _shared(plan: _plan.Plan, given: Mapping[str, np.ndarray], subject: str) -> dict[str, Any]:
  """The arrays that the layers share; every layer of a file gets the same objects."""
  expected = _plan.shared(plan.slots)
  if set(given) != set(expected):
    raise ValueError(f'{subject} has shared arrays {sorted(given)}; expected {sorted(expected)}.')
  for slot in expected:
    if given[slot].shape != plan.shapes[slot]:
      raise ValueError(
        f'{subject}: the shared {slot} has shape {given[slot].shape}; expected {plan.shapes[slot]}.'
      )
  return {
    s: jax.device_put(jnp.asarray(given[s], plan.slots[s].dtype), plan.shardings[s])
    for s in expected
  }

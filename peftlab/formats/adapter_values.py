"""The arrays of an adapter by layer name: taken from a model, and put together for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _attach, _initial, _layer, _parts, _plan, _processes, _sites
from peftlab.formats import layer_names, stack_values

# {layer name: {slot: array of one layer}}; under '' the arrays that all layers share
Values = dict[str, dict[str, np.ndarray]]


def collect(model: nnx.Module, name: str) -> tuple[dict[str, _adapter.Adapter], Values]:
  """(the adapter of every layer, the arrays of every layer).

  Raises:
    ValueError: several adapters of that name have shared arrays.
  """
  adapters: dict[str, _adapter.Adapter] = {}
  values: Values = {}
  sharing = set()
  whole: dict[tuple, dict[str, np.ndarray]] = {}
  for place, attached in layer_names.adapted(model, name):
    site = place.site
    if site.path not in whole:
      whole[site.path] = _host_arrays(attached)
    layer = place.hf_name or place.name
    adapters[layer] = attached.adapter
    shared = _plan.shared(attached.slots())
    values[layer] = {
      slot: layer_names.take(whole[site.path][slot], site.slot_axes(of), place.index)
      for slot, of in attached.slots().items()
      if not of.shared and of.saved
    }
    if shared:
      sharing.add(attached.adapter)
      values[''] = {slot: whole[site.path][slot] for slot in shared}
  if len(sharing) > 1:
    raise ValueError(f'Adapter {name!r} has several types that share arrays; name them apart.')
  return adapters, values


def _host_arrays(attached: _layer.Attached) -> dict[str, np.ndarray]:
  slots = attached.slots()
  return {slot: _processes.host(getattr(attached, slot)[...]) for slot in slots}


def plans_and_arrays(
  model: nnx.Module,
  name: str,
  values: Values,
  adapters: Mapping[str, _adapter.Adapter],
  *,
  known: dict[layer_names.Key, layer_names.Place],
  subject: str,
  partial: bool = False,
) -> tuple[list[_plan.Plan], dict[str, dict[str, Any]], list[layer_names.Place]]:
  """What `install` takes, and the layers that it is for.

  Args:
    model: gets the adapter.
    name: of it there.
    values: of a file, by layer.
    adapters: likewise.
    known: the layers of the base.
    subject: the start of every message.
    partial: layers of a stack that the file does not have get a fresh adapter, which is told.
  """
  shared = values.get('', {})
  values = {layer: slots for layer, slots in values.items() if layer}
  placed, lost = _placed(values, known, subject)
  kinds = {
    layer_names.canonical(layer_names.find(known, layer).name): kind
    for layer, kind in adapters.items()
  }
  fresh = {site.path: site for site in _sites.sites(model, norms=True, points=True)}
  plans, arrays, stacks = [], {}, {}
  for site, each in layer_names.by_site(placed, known):
    own = {kinds[key] for key in placed if known[key].site.path == site.path}
    adapter = stack_values.common(own, f'{subject}: {site.name}')
    here = dataclasses.replace(fresh[site.path], one=site.one)
    plans.append(_plan.plan(here, adapter, name))
    stacks[site.name] = {i: stack_values.padded(slots, adapter) for i, slots in each.items()}
  plans = _plan.share(plans, {})
  started = [plan for plan in plans if plan.site.path in lost]
  if started:
    stack_values.check_start(started, lost, partial=partial, have=len(placed), subject=subject)
  starts = _initial.initial_values(started, jax.random.key(0)) if started else {}
  for plan in plans:
    at = plan.site.name
    arrays[at] = _stacked(plan, stacks[at], subject, starts.get(at))
  for plan in [p for p in plans if _plan.shared(p.slots)][:1]:  # install takes them for every layer
    arrays[plan.site.name] |= _shared(plan, shared, subject)
    shared = {}
  if shared:
    raise ValueError(f'{subject} has shared arrays {sorted(shared)}, which no layer takes.')
  if any(not slot.saved for plan in plans for slot in plan.slots.values()):
    made = _initial.initial_values(plans, jax.random.key(0))
    arrays = {layer: made[layer] | own for layer, own in arrays.items()}
  return plans, arrays, [known[key] for key in placed]


def attached(
  model: nnx.Module,
  name: str,
  values: Values,
  adapters: Mapping[str, _adapter.Adapter],
  *,
  subject: str,
  partial: bool = False,
  check: Callable[[list[layer_names.Place]], None] = lambda places: None,
) -> nnx.Module:
  """The model with an adapter that has these arrays, in evaluation mode; see `plans_and_arrays`.

  `check` is given the layers before anything is installed.
  """
  known = layer_names.places(model, one=True)
  model = _parts.merge(_parts.split(model))
  plans, arrays, places = plans_and_arrays(
    model, name, values, adapters, known=known, subject=subject, partial=partial
  )
  check(places)
  _attach.install(plans, name, arrays, training=False)
  return model


def _placed(
  values: Values, known: dict, subject: str
) -> tuple[dict[layer_names.Key, dict], dict[tuple, list[str]]]:
  """(the layers of the file by canonical name, {path of a stack: its layers that lack there})."""
  placed = {}
  try:
    for layer, slots in values.items():
      place = layer_names.find(known, layer)
      placed[layer_names.canonical(place.name)] = slots
  except ValueError as error:
    raise ValueError(f'{subject}: {error}') from None
  touched = {known[key].site.path: known[key].site.one for key in placed}
  for place in (known[key] for key in placed):
    if place.site.one != touched[place.site.path]:
      raise ValueError(
        f'{subject} has arrays of {place.site.name} both for each expert and for all of them.'
      )
  wanted = [k for k, place in known.items() if touched.get(place.site.path) == place.site.one]
  lost: dict[tuple, list[str]] = {}
  for key in wanted:
    if key not in placed:
      lost.setdefault(known[key].site.path, []).append(known[key].name)
  return placed, lost


def _stacked(
  plan: _plan.Plan,
  each: dict[tuple, dict],
  subject: str,
  start: Mapping[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
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
    first = None if start is None else _processes.host(start[slot])
    whole = layer_names.put_together(layers, stack, plan.site.own_layers, first)
    dtype = plan.slots[slot].dtype
    arrays[slot] = _processes.put(jnp.asarray(whole, dtype), plan.shardings[slot])
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
    s: _processes.put(jnp.asarray(given[s], plan.slots[s].dtype), plan.shardings[s])
    for s in expected
  }

"""An adapter on disk: per layer, unpadded, unsharded; an HF PEFT folder where PEFT has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _attach, _layer, _parts, _plan, _registry, _sites
from peftlab.formats import (
  base_samples,
  files,
  hf_peft,
  layer_names,
  peft_config,
  safetensors_file,
)

CARD = 'peftlab.json'
TENSORS = hf_peft.TENSORS
VERSION = 1
KEYS = ('format', 'type', 'fields', 'layers', 'base', 'tensors')

# {layer name: {slot: array of one layer}}
Values = dict[str, dict[str, np.ndarray]]


def save_adapter(
  model: nnx.Module, directory: str | os.PathLike[str], *, name: str = 'default'
) -> None:
  """Writes one adapter of a model to a folder, readable in any layout and on any mesh.

  `adapter_model.safetensors` holds its arrays, one per layer; `peftlab.json` its type, fields,
  layers and a sample of the base. A type that HF PEFT has is written as a PEFT folder, with Hugging
  Face's names where the model knows them.

  Raises:
    ValueError: no adapter of that name, two types under the name, NaN or infinity in its arrays,
      or a folder that cannot be made. Nothing is written then.
  """
  _attach.require(model, name)
  adapter, values, embeddings = _collect(model, name)
  directory = pathlib.Path(directory)
  files.existing_folder(directory.parent)
  for layer, slots in values.items():
    for slot, array in slots.items():
      if not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f'Adapter {name!r}: {layer}.{slot} holds a NaN or an infinity.')
  config, tensors = {}, {}
  if adapter.peft_type:
    config, tensors = adapter.to_peft(values, embeddings=embeddings)
    config = peft_config.check_config(
      config | _targets(model, values), subject=f"PEFT folder '{directory}'", strict=True
    )
    # A scale that was changed after attaching is in the arrays; the fields follow them.
    found = type(adapter).from_peft(config, tensors)[0]
    told = {field: getattr(found, field) for field in adapter.peft_fields}
    adapter = dataclasses.replace(adapter, **told)
  card = _card(model, adapter, values)
  directory.mkdir(exist_ok=True)
  (directory / CARD).unlink(missing_ok=True)
  if adapter.peft_type:
    hf_peft.write_peft_folder(directory, config, tensors)
  else:
    tensors = {f'{layer}.{slot}': a for layer, of in values.items() for slot, a in of.items()}
    safetensors_file.write_safetensors(directory / TENSORS, tensors)
  card['tensors'] = _file_digest(directory / TENSORS)
  files.write_json(directory / CARD, card | {'digest': _digest(card)})


def load_adapter(
  model: nnx.Module,
  directory: str | os.PathLike[str],
  *,
  name: str = 'default',
  any_base: bool = False,
) -> nnx.Module:
  """A model with the adapter of a folder attached; the one given is untouched.

  Args:
    model: the base, in any layout, on any mesh, in any precision.
    directory: written by `save_adapter`, or an HF PEFT folder.
    name: of the adapter in the model.
    any_base: accept an adapter that was made on another base.

  Raises:
    ValueError: a missing, damaged or edited file, an unknown type, layers that are missing, too
      many or of other shapes, another base, or a taken name.
  """
  directory = files.existing_folder(directory)
  adapter, values, card = _read(directory)
  known = layer_names.places(model)
  subject = f"Adapter folder '{directory}'"
  placed = _placed(values, known, subject)
  model = _parts.merge(_parts.split(model))
  fresh = {site.path: site for site in _sites.sites(model)}
  plans, arrays = [], {}
  for site, each in layer_names.by_site(placed, known):
    plan = _plan.plan(fresh[site.path], adapter, name)
    arrays[plan.site.name] = _stacked(plan, each, subject)
    plans.append(plan)
  if card and not any_base:
    _check_base([known[key] for key in placed], card, subject)
  _attach.install(plans, adapter, name, arrays)
  return model


def _collect(model: nnx.Module, name: str) -> tuple[_adapter.Adapter, Values, set[str]]:
  """The type, the arrays of every layer, and which layers are embeddings."""
  values: Values = {}
  embeddings = set()
  types = set()
  whole: dict[tuple, dict[str, np.ndarray]] = {}
  for place in layer_names.places(model).values():
    site = place.site
    attached = next((a for a in getattr(site.layer, 'adapters', ()) if a.name == name), None)
    if attached is None:
      continue
    types.add(attached.adapter)
    if site.path not in whole:
      whole[site.path] = _host_arrays(attached)
    layer = place.hf_name or place.name
    values[layer] = {
      slot: layer_names.take(array, _stack_of(attached, slot), place.index)
      for slot, array in whole[site.path].items()
    }
    if not site.kind.linear:
      embeddings.add(layer)
  if len(types) != 1:
    raise ValueError(f'Adapter {name!r} has several types or ranks: {types}; name them apart.')
  return types.pop(), values, embeddings


def _host_arrays(attached: _layer.Attached) -> dict[str, np.ndarray]:
  slots = attached.adapter.slots()
  return {slot: np.asarray(jax.device_get(getattr(attached, slot)[...])) for slot in slots}


def _stack_of(attached: _layer.Attached, slot: str) -> tuple[int, ...]:
  return getattr(attached, slot).get_metadata().get('stack', ())


def _card(model: nnx.Module, adapter: _adapter.Adapter, values: Values) -> dict[str, Any]:
  known = layer_names.places(model)
  adapted = [layer_names.find(known, layer) for layer in values]
  return {
    'format': VERSION,
    'type': _registry.adapters.name_of(adapter),
    'fields': dataclasses.asdict(adapter),
    'layers': {layer: {s: list(a.shape) for s, a in of.items()} for layer, of in values.items()},
    'base': _samples(adapted),
  }


def _samples(adapted: Collection[layer_names.Place]) -> dict[str, list[float]]:
  by_site = {place.site.path: place.site for place in adapted}
  numbers = {path: base_samples.sample(site) for path, site in by_site.items()}
  return {p.name: [float(v) for v in numbers[p.site.path][p.index]] for p in adapted}


def _targets(model: nnx.Module, values: Values) -> dict[str, Any]:
  every = [place.hf_name or place.name for place in layer_names.places(model).values()]
  return {'target_modules': hf_peft.target_names(values, among=every)}


def _digest(card: Mapping[str, Any]) -> str:
  text = json.dumps({k: card[k] for k in KEYS}, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _read(directory: pathlib.Path) -> tuple[_adapter.Adapter, Values, dict[str, Any]]:
  if not (directory / CARD).exists():
    return *_read_peft(directory), {}
  card = files.read_json(directory / CARD)
  subject = f"'{directory / CARD}'"
  missing = [key for key in (*KEYS, 'digest') if key not in card]
  if missing:
    raise ValueError(f'{subject} lacks {", ".join(missing)}.')
  if card['format'] != VERSION:
    raise ValueError(f'{subject} has format {card["format"]!r}; this version reads {VERSION}.')
  if _digest(card) != card['digest']:
    raise ValueError(f'{subject} was edited after it was written: its digest does not fit.')
  cls = _registry.adapters.get(card['type'])
  adapter = _from_fields(cls, card['fields'], subject)
  if adapter.peft_type:
    found, values = _read_peft(directory)
    adapter = _agree(adapter, found, directory)
  else:
    values = _read_plain(directory)
  _check_layers(values, card['layers'], subject)
  if _file_digest(directory / TENSORS) != card['tensors']:
    raise ValueError(f"'{directory / TENSORS}' was changed after it was written.")
  return adapter, values, card


def _read_peft(directory: pathlib.Path) -> tuple[_adapter.Adapter, Values]:
  config, tensors = hf_peft.read_peft_folder(directory)
  for type_name in _registry.adapters.names():
    cls = _registry.adapters.get(type_name)
    if cls.peft_type == config['peft_type']:
      return cls.from_peft(config, tensors)
  raise ValueError(f"No adapter type reads PEFT's {config['peft_type']!r} ('{directory}').")


def _read_plain(directory: pathlib.Path) -> Values:
  values: Values = {}
  for key, array in safetensors_file.SafetensorsFile(directory / TENSORS).items():
    layer, _, slot = key.rpartition('.')
    values.setdefault(layer, {})[slot] = array
  return values


def _from_fields(cls: type, fields: Any, subject: str) -> _adapter.Adapter:
  known = [f.name for f in dataclasses.fields(cls)]
  for key in fields:
    if key not in known:
      near = _registry.did_you_mean(key, known)
      raise ValueError(f'{subject}: {cls.__name__} has no field {key!r}{near or "."}')
  return cls(**fields)


def _agree(
  adapter: _adapter.Adapter, found: _adapter.Adapter, directory: pathlib.Path
) -> _adapter.Adapter:
  """The adapter of the card, where PEFT's config says the same of it."""
  for field in found.peft_fields:
    ours, theirs = getattr(adapter, field), getattr(found, field)
    if ours != theirs:
      raise ValueError(
        f"'{directory}' was edited: {hf_peft.CONFIG} has {field} {theirs!r}, {CARD} {ours!r}."
      )
  return adapter


def _check_layers(values: Values, told: Mapping[str, Any], subject: str) -> None:
  missing = [layer for layer in told if layer not in values]
  extra = [layer for layer in values if layer not in told]
  if missing or extra:
    raise ValueError(
      f'{subject} names {len(told)} layers, the tensors {len(values)}: '
      f'missing {missing[:4] or "none"}, extra {extra[:4] or "none"}.'
    )
  for layer, slots in told.items():
    shapes = {slot: list(array.shape) for slot, array in values[layer].items()}
    if shapes != slots:
      raise ValueError(f'{subject}: {layer} has shapes {slots}, its tensors {shapes}.')


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
  for slot, shape in plan.shapes.items():
    stack = plan.stacks[slot]
    own = tuple(s for i, s in enumerate(shape) if i not in stack)
    layers = {}
    for index, slots in each.items():
      where = f'{subject}: {plan.site.name}{list(index) or ""}'
      if set(slots) != set(plan.slots):
        raise ValueError(f'{where} has slots {sorted(slots)}; expected {sorted(plan.slots)}.')
      if slots[slot].shape != own:
        raise ValueError(f'{where}.{slot} has shape {slots[slot].shape}; expected {own}.')
      layers[index] = slots[slot]
    whole = layer_names.put_together(layers, stack, plan.site.layers)
    dtype = plan.slots[slot].dtype
    arrays[slot] = jax.device_put(jnp.asarray(whole, dtype), plan.shardings[slot])
  return arrays


def _check_base(
  adapted: Collection[layer_names.Place], card: Mapping[str, Any], subject: str
) -> None:
  told = {layer_names.canonical(name): numbers for name, numbers in card['base'].items()}
  found = {layer_names.canonical(name): numbers for name, numbers in _samples(adapted).items()}
  far = base_samples.distance(found, told)
  if far > base_samples.FURTHEST:
    raise ValueError(
      f'{subject} was made on another base: the weights it was trained with differ by '
      f'{100 * far:.0f} % from these (any_base=True takes it all the same).'
    )

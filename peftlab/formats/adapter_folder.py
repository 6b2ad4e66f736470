"""An adapter on disk: per layer, unpadded, unsharded; an HF PEFT folder where PEFT has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

from flax import nnx
import numpy as np

from peftlab import _adapter, _attach, _parts, _registry
from peftlab.formats import (
  adapter_values,
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
SOURCE = 'source'  # in a card that says it: where the base was loaded from

MORE = 'more'  # other adapters of the same name, with their layers
Values = adapter_values.Values


class OtherBaseError(ValueError):
  """An adapter that was made on another base."""


def save_adapter(
  model: nnx.Module, directory: str | os.PathLike[str], *, name: str = 'default', source: str = ''
) -> None:
  """Writes one adapter of a model to a folder, readable in any layout and on any mesh.

  `adapter_model.safetensors` holds its arrays, one per layer; `peftlab.json` its type, fields,
  layers and a sample of the base. A type that HF PEFT has is written as a PEFT folder, with Hugging
  Face's names where the model knows them; layers with different adapters only as our own.

  Args:
    model: carries the adapter.
    directory: is made where there is none, in a folder that exists.
    name: of the adapter.
    source: what the base was loaded from, in the words of `load_model`; it is kept in the card.

  Raises:
    ValueError: no adapter of that name, NaN or infinity in its arrays, or a folder that cannot be
      made or written. Nothing is written then.
  """
  directory = files.writable_folder(directory, subject='Adapter folder')
  _attach.require(model, name)
  adapters, values, embeddings = adapter_values.collect(model, name)
  for layer, slots in values.items():
    for slot, array in slots.items():
      if not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f'Adapter {name!r}: {layer}.{slot} holds a NaN or an infinity.')
  config, tensors = {}, {}
  first, *others = dict.fromkeys(adapters.values())
  if first.peft_type and not others:
    config, tensors = first.to_peft(values, embeddings=embeddings)
    config = peft_config.check_config(
      config | _targets(model, values), subject=f"PEFT folder '{directory}'", strict=True
    )
    # A scale that was changed after attaching is in the arrays; the fields follow them.
    found = type(first).from_peft(config, tensors)[0]
    told = {field: getattr(found, field) for field in first.peft_fields}
    adapters = dict.fromkeys(adapters, dataclasses.replace(first, **told))
  else:
    tensors = {
      f'{layer}.{slot}' if layer else slot: array
      for layer, of in values.items()
      for slot, array in of.items()
    }
  card = _card(model, adapters, values) | ({SOURCE: source} if source else {})
  _write(directory, card, config, tensors)


def _write(
  directory: pathlib.Path, card: dict[str, Any], config: dict[str, Any], tensors: dict[str, Any]
) -> None:
  """Writes the files of a folder, all or none: aside first, then moved, the card last."""
  new = not directory.exists()
  try:
    with tempfile.TemporaryDirectory(prefix='.', dir=directory.parent if new else directory) as at:
      staged = pathlib.Path(at) / 'adapter'
      staged.mkdir()
      if config:
        hf_peft.write_peft_folder(staged, config, tensors)
      else:
        safetensors_file.write_safetensors(staged / TENSORS, tensors)
      card['tensors'] = _file_digest(staged / TENSORS)
      files.write_json(staged / CARD, card | {'digest': _digest(card)})
      if new:
        staged.rename(directory)
        return
      # Killed between these lines: a folder that is refused, never old words beside new tensors.
      for name in (CARD, hf_peft.CONFIG):
        (directory / name).unlink(missing_ok=True)
      for name in (TENSORS, hf_peft.CONFIG, CARD):
        if (staged / name).exists():
          os.replace(staged / name, directory / name)
  except OSError as error:
    raise ValueError(
      f"Adapter folder '{directory}' cannot be written: {error.strerror}."
    ) from error


def source_of(directory: str | os.PathLike[str]) -> str:
  """What the base of an adapter was loaded from, as its folder says; '' where it does not.

  Raises:
    ValueError: no such folder, or one that `load_adapter` would not read.
  """
  return str(_read(files.existing_folder(directory))[2].get(SOURCE, ''))


def load_adapter(
  model: nnx.Module,
  directory: str | os.PathLike[str],
  *,
  name: str = 'default',
  any_base: bool = False,
) -> nnx.Module:
  """A model with the adapter of a folder attached; the one given is untouched.

  The adapter is in evaluation mode; `model.train()` switches its dropout on.

  Args:
    model: the base, in any layout, on any mesh, in any precision.
    directory: written by `save_adapter`, or an HF PEFT folder.
    name: of the adapter in the model.
    any_base: accept an adapter that was made on another base.

  Raises:
    ValueError: a missing, damaged or edited file, an unknown type, layers that are missing, too
      many or of other shapes, another base, or a name that cannot be.
  """
  _attach.check_name(name)
  directory = files.existing_folder(directory)
  adapters, values, card = _read(directory)
  known = layer_names.places(model)
  subject = f"Adapter folder '{directory}'"
  model = _parts.merge(_parts.split(model))
  plans, arrays, places = adapter_values.plans_and_arrays(
    model, name, values, adapters, known=known, subject=subject
  )
  if card and not any_base:
    _check_base(places, card, subject)
  _attach.install(plans, name, arrays, training=False)
  return model


def _card(
  model: nnx.Module, adapters: Mapping[str, _adapter.Adapter], values: Values
) -> dict[str, Any]:
  known = layer_names.places(model)
  adapted = [layer_names.find(known, layer) for layer in adapters]
  groups: dict[_adapter.Adapter, list[str]] = {}
  for layer, adapter in adapters.items():
    groups.setdefault(adapter, []).append(layer)
  first, *others = groups
  more = [_told(adapter) | {'layers': groups[adapter]} for adapter in others]
  return {
    'format': VERSION,
    **_told(first),
    **({MORE: more} if more else {}),
    'layers': {layer: {s: list(a.shape) for s, a in of.items()} for layer, of in values.items()},
    'base': _samples(adapted),
  }


def _told(adapter: _adapter.Adapter) -> dict[str, Any]:
  name = _registry.adapters.name_of(adapter)
  return {'type': name, 'fields': dataclasses.asdict(adapter)}


def _samples(adapted: Collection[layer_names.Place]) -> dict[str, list[float]]:
  by_site = {place.site.path: place.site for place in adapted}
  numbers = {path: base_samples.sample(site) for path, site in by_site.items()}
  return {p.name: [float(v) for v in numbers[p.site.path][p.index]] for p in adapted}


def _targets(model: nnx.Module, values: Values) -> dict[str, Any]:
  every = [place.hf_name or place.name for place in layer_names.places(model).values()]
  return {'target_modules': hf_peft.target_names([v for v in values if v], among=every)}


def _digest(card: Mapping[str, Any]) -> str:
  text = json.dumps({k: card[k] for k in (*KEYS, SOURCE, MORE) if k in card}, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _read(
  directory: pathlib.Path,
) -> tuple[dict[str, _adapter.Adapter], Values, dict[str, Any]]:
  """(the adapter of every layer, the arrays, our card or {})."""
  if not (directory / CARD).exists():
    adapter, values = _read_peft(directory)
    return dict.fromkeys((layer for layer in values if layer), adapter), values, {}
  card = files.read_json(directory / CARD)
  subject = f"'{directory / CARD}'"
  missing = [key for key in (*KEYS, 'digest') if key not in card]
  if missing:
    raise ValueError(f'{subject} lacks {", ".join(missing)}.')
  if card['format'] != VERSION:
    raise ValueError(f'{subject} has format {card["format"]!r}; this version reads {VERSION}.')
  if _digest(card) != card['digest']:
    raise ValueError(f'{subject} was edited after it was written: its digest does not fit.')
  adapter = _from_fields(card, subject)
  if adapter.peft_type and MORE not in card:
    found, values = _read_peft(directory)
    adapter = _agree(adapter, found, directory)
  else:
    values = _read_plain(directory)
  _check_layers(values, card['layers'], subject)
  if _file_digest(directory / TENSORS) != card['tensors']:
    raise ValueError(f"'{directory / TENSORS}' was changed after it was written.")
  adapters = dict.fromkeys((layer for layer in values if layer), adapter)
  for other in card.get(MORE, ()):
    adapters |= dict.fromkeys(other['layers'], _from_fields(other, subject))
  return adapters, values, card


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


def _from_fields(told: Mapping[str, Any], subject: str) -> _adapter.Adapter:
  cls, fields = _registry.adapters.get(told['type']), told['fields']
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


def _check_base(
  adapted: Collection[layer_names.Place], card: Mapping[str, Any], subject: str
) -> None:
  told = {layer_names.canonical(name): numbers for name, numbers in card['base'].items()}
  found = {layer_names.canonical(name): numbers for name, numbers in _samples(adapted).items()}
  far = base_samples.distance(found, told)
  if far > base_samples.FURTHEST:
    source = f', {card[SOURCE]}' if SOURCE in card else ''
    raise OtherBaseError(
      f'{subject} was made on another base{source}: the weights it was trained with differ by '
      f'{100 * far:.0f} % from these (any_base=True takes it all the same).'
    )

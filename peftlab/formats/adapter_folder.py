"""An adapter on disk: per layer, unpadded, unsharded; an HF PEFT folder where PEFT has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import tempfile
from typing import Any

from flax import nnx
import numpy as np

from peftlab import _adapter, _attach, _processes, _registry, _sites
from peftlab.formats import (
  adapter_values,
  base_samples,
  files,
  hf_peft,
  layer_names,
  peft_config,
  peft_rows,
  peft_values,
  peft_writing,
  safetensors_file,
)

CARD = 'peftlab.json'
TENSORS = hf_peft.TENSORS
VERSION = 1
KEYS = ('format', 'type', 'fields', 'layers', 'base', 'tensors')
SOURCE = 'source'  # in a card that says it: where the base was loaded from

MORE = 'more'  # other adapters of the same name, with their layers
PEFT = 'peft'  # in a card whose folder is one of PEFT too
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

  Of several processes all have to call; the first writes.

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
  adapters, values = adapter_values.collect(model, name)
  for layer, slots in values.items():
    for slot, array in slots.items():
      if not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f'Adapter {name!r}: {layer}.{slot} holds a NaN or an infinity.')
  config, tensors, write = {}, {}, hf_peft.write_peft_folder
  table = peft_rows.write(adapters, values, layer_names.places(model, one=True))
  found = peft_writing.write(adapters, values, _layers(model, values))
  if found is not None:  # a scale that was changed is in the arrays; the fields follow them
    config, tensors, adapters = found
    subject = f"PEFT folder '{directory}'"
    config = peft_config.check_config(config, subject=subject, strict=True)
  elif table is not None:
    (config, tensors), write = table, peft_rows.write_folder
  else:
    tensors = {
      f'{layer}.{slot}' if layer else slot: array
      for layer, of in values.items()
      for slot, array in of.items()
    }
  card = _card(model, adapters, values, peft=bool(config)) | ({SOURCE: source} if source else {})
  _processes.by_first(lambda: _write(directory, card, config, tensors, write))


def _write(
  directory: pathlib.Path,
  card: dict[str, Any],
  config: dict[str, Any],
  tensors: dict[str, Any],
  write: Callable[[pathlib.Path, dict[str, Any], dict[str, Any]], None],
) -> None:
  """Writes the files of a folder, all or none: aside first, then moved, the card last."""
  new = not directory.exists()
  try:
    with tempfile.TemporaryDirectory(prefix='.', dir=directory.parent if new else directory) as at:
      staged = pathlib.Path(at) / 'adapter'
      staged.mkdir()
      if config:
        write(staged, config, tensors)
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
  known = layer_names.places(model, one=True)
  adapters, values, card = _read(directory, known)
  subject = f"Adapter folder '{directory}'"

  def check(places: Collection[layer_names.Place]) -> None:
    if card and not any_base:
      _check_base(places, card, subject)

  return adapter_values.attached(
    model, name, values, adapters, subject=subject, partial=True, check=check
  )


def _card(
  model: nnx.Module, adapters: Mapping[str, _adapter.Adapter], values: Values, *, peft: bool
) -> dict[str, Any]:
  known = layer_names.places(model, one=True)
  adapted = [layer_names.find(known, layer) for layer in adapters]
  groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
  for layer, adapter in adapters.items():
    told = _told(adapter)
    groups.setdefault(repr(told), (told, []))[1].append(layer)
  (first, _), *others = groups.values()
  more = [told | {'layers': layers} for told, layers in others]
  return {
    'format': VERSION,
    **first,
    **({MORE: more} if more else {}),
    **({PEFT: True} if peft else {}),
    'layers': {layer: {s: list(a.shape) for s, a in of.items()} for layer, of in values.items()},
    'base': _samples(adapted),
  }


def _told(adapter: _adapter.Adapter) -> dict[str, Any]:
  name = _registry.adapters.name_of(adapter)
  return {'type': name, 'fields': dataclasses.asdict(adapter)}


def _samples(adapted: Collection[layer_names.Place]) -> dict[str, list[float]]:
  by_site = {place.site.path: place.site for place in adapted}
  numbers = {path: base_samples.sample(site) for path, site in by_site.items()}
  # Of experts that share their arrays, the first tells the base.
  each = {p.name: numbers[p.site.path][p.index].reshape(-1, base_samples.COUNT)[0] for p in adapted}
  return {name: [float(v) for v in own] for name, own in each.items()}


def _layers(model: nnx.Module, values: Values) -> dict[str, peft_values.Layer]:
  """What the form of PEFT has to know of each layer of a base."""
  # Of a layer with experts, the names of each expert or that of all: as the adapter has them.
  places = layer_names.places(model, one=True).values()
  shared = {p.site.path for p in places if p.site.one and (p.hf_name or p.name) in values}
  every = [p for p in places if p.site.one == (p.site.path in shared)]
  return {p.hf_name or p.name: _layer(p) for p in every}


def _layer(place: layer_names.Place) -> peft_values.Layer:
  kind, sizes = place.site.kind, place.site.sizes
  if kind.norm or kind.point:
    word = 'norm' if kind.norm else 'point'
  elif not kind.linear:
    word = 'embedding'
  else:
    word = 'conv' if place.site.layout.equation is None else 'linear'
  return peft_values.Layer(word, (sizes['in'], sizes['out']), head=_sites.is_head(place.site))


def _digest(card: Mapping[str, Any]) -> str:
  text = json.dumps({k: card[k] for k in (*KEYS, SOURCE, MORE, PEFT) if k in card}, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


Known = Mapping[layer_names.Key, layer_names.Place]


def _read(
  directory: pathlib.Path, known: Known | None = None
) -> tuple[dict[str, _adapter.Adapter], Values, dict[str, Any]]:
  """(the adapter of every layer, the arrays, our card or {}), for a base with layers `known`."""
  if not (directory / CARD).exists():
    return *_read_peft(directory, known), {}
  card = files.read_json(directory / CARD)
  subject = f"'{directory / CARD}'"
  missing = [key for key in (*KEYS, 'digest') if key not in card]
  if missing:
    raise ValueError(f'{subject} lacks {", ".join(missing)}.')
  if card['format'] != VERSION:
    raise ValueError(f'{subject} has format {card["format"]!r}; this version reads {VERSION}.')
  if _digest(card) != card['digest']:
    raise ValueError(f'{subject} was edited after it was written: its digest does not fit.')
  adapters = _of_card(card, subject)
  if card.get(PEFT) or (directory / hf_peft.CONFIG).exists():
    found, values = _read_peft(directory, known, card=adapters, shapes=card['layers'])
    _agree(adapters, found, directory)
  else:
    values = _read_plain(directory)
  _check_layers(values, card['layers'], subject)
  if _file_digest(directory / TENSORS) != card['tensors']:
    raise ValueError(f"'{directory / TENSORS}' was changed after it was written.")
  return adapters, values, card


def _of_card(card: Mapping[str, Any], subject: str) -> dict[str, _adapter.Adapter]:
  """The adapter of every layer, as our card tells it."""
  first = _from_fields(card, subject)
  adapters = dict.fromkeys((layer for layer in card['layers'] if layer), first)
  for other in card.get(MORE, ()):
    adapters |= dict.fromkeys(other['layers'], _from_fields(other, subject))
  return adapters


def _read_peft(
  directory: pathlib.Path,
  known: Known | None,
  *,
  card: Mapping[str, _adapter.Adapter] | None = None,
  shapes: Mapping[str, Any] | None = None,
) -> tuple[dict[str, _adapter.Adapter], Values]:
  table = peft_rows.read(directory, known, card=shapes)
  if table is not None:
    return table
  types = {adapter.peft.type for adapter in (card or {}).values() if adapter.peft}
  wanted = types.pop() if len(types) == 1 else None
  config, tensors = hf_peft.read_peft_folder(directory, peft_type=wanted)
  subject = f"Adapter folder '{directory}'"

  def describe(path: str) -> peft_values.Layer | None:
    if known is None:
      return None
    try:
      return _layer(layer_names.find(dict(known), path))
    except ValueError as error:
      raise ValueError(f'{subject}: {error}') from None

  adapters, values = peft_values.read(
    config, tensors, subject=subject, describe=describe, card=card
  )
  if known is not None and card is None:
    layers = {p.hf_name or p.name: _layer(p) for p in known.values() if not p.site.one}
    lost = peft_values.missing(config, adapters, layers, subject=subject)
    if lost:
      raise ValueError(
        f'{subject} has {len(adapters)} of {len(adapters) + len(lost)} layers that its config '
        f'selects; missing: {", ".join(lost[:6])}.'
      )
  return adapters, values


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
  told: Mapping[str, _adapter.Adapter],
  found: Mapping[str, _adapter.Adapter],
  directory: pathlib.Path,
) -> None:
  """Raises ValueError unless PEFT's config says of every layer what the card says."""
  for layer in found:
    if layer not in told:
      continue  # `_check_layers` names it
    for field in dataclasses.fields(told[layer]):
      ours, theirs = getattr(told[layer], field.name), getattr(found[layer], field.name, None)
      numbers = isinstance(ours, float) and isinstance(theirs, float)
      close = numbers and math.isclose(ours, theirs, rel_tol=1e-6)
      if ours != theirs and not close:
        raise ValueError(
          f"'{directory}' was edited: {hf_peft.CONFIG} has {field.name} {theirs!r}, {CARD} "
          f'{ours!r} ({layer}).'
        )


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

"""Adapters and their arrays by layer -> the tensors and the config of an HF PEFT folder."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import re
from typing import Any

import numpy as np

from peftlab import _adapter
from peftlab.formats.peft_form import Beside, Fields, PeftForm, Slots
from peftlab.formats.peft_values import PREFIX, Adapters, Layer, Part, Values, constant_of


def write(
  adapters: Adapters, values: Values, layers: Mapping[str, Layer]
) -> tuple[dict[str, Any], dict[str, np.ndarray], Adapters] | None:
  """(config, tensors, the adapters with the fields that the arrays tell); None: PEFT has no form.

  Args:
    adapters: of every layer.
    values: of every layer, and under '' what they share.
    layers: of the whole base, by path.
  """
  parts = _parts(adapters)
  if parts is None or not set(adapters) <= set(layers):
    return None
  main, beside = parts
  if {tensor.slot for tensor in main.form.shared} != set(values.get('', {})):
    return None
  tensors = _shared_tensors(main, values.get('', {}))
  told: dict[str, Fields] = {}
  named: dict[str, dict[str, Fields]] = {}
  shapes: dict[str, dict[str, tuple]] = {}
  result: Adapters = {}
  for path, adapter in adapters.items():
    part = next((p for p in beside if p.kind is type(adapter)), main)
    fields, slots = _as_told(part, adapter, values[path])
    own = _layer_tensors(part, fields, slots, layers[path])
    if own is None:
      return None
    result[path] = _settled(part, adapter, fields)
    tensors |= {f'{PREFIX}{path}.{end}': array for end, array in own.items()}
    if isinstance(part.form, Beside):
      named.setdefault(part.form.key, {})[path] = fields
    else:
      told[path], shapes[path] = fields, {end: array.shape for end, array in own.items()}
  config = _config(main, told, shapes, layers)
  if config is None:
    return None
  for part in beside:
    config[part.form.key] = part.form.value(named[part.form.key])
  return config, tensors, result


def _parts(adapters: Adapters) -> tuple[Part, list[Part]] | None:
  """(the main type's, those beside it), where PEFT can write these types together."""
  kinds = list(dict.fromkeys(type(adapter) for adapter in adapters.values()))
  mains = [kind for kind in kinds if kind.peft and not (len(kinds) > 1 and kind.peft_beside)]
  others = [kind for kind in kinds if kind not in mains]
  if len(mains) != 1 or not all(o.peft_beside for o in others):
    return None
  main = mains[0]
  if any(other.peft_beside.key not in main.peft.besides for other in others):
    return None
  return Part(main, main.peft), [Part(kind, kind.peft_beside) for kind in others]


def _as_told(part: Part, adapter: _adapter.Adapter, slots: Slots) -> tuple[Fields, Slots]:
  """The fields and slots of a layer that the form is of; a field follows the scale there."""
  form = part.form
  if isinstance(form, Beside):
    return {name: getattr(adapter, name) for name in form.written}, slots
  every = {field.name: getattr(adapter, field.name) for field in dataclasses.fields(adapter)}
  if form.scale:
    field, slot = form.scale
    every[field] = _scaled(adapter, field, slot, float(slots[slot]))
  return form.pack(every, slots) if form.pack else (every, slots)


def _scaled(adapter: _adapter.Adapter, field: str, slot: str, scale: float) -> float:
  """The field with which the slot is `scale`: the adapter's own where that is so."""
  if np.float32(constant_of(adapter.slots()[slot])) == np.float32(scale):
    return getattr(adapter, field)
  one: Any = {field: 1.0}
  unit = constant_of(dataclasses.replace(adapter, **one).slots()[slot])
  assert unit
  return scale / unit


def _settled(part: Part, adapter: _adapter.Adapter, fields: Fields) -> _adapter.Adapter:
  form = part.form
  if isinstance(form, Beside) or not form.scale:
    return adapter
  own = form.unpack(fields, {})[0] if form.unpack else fields
  return dataclasses.replace(adapter, **{form.scale[0]: own[form.scale[0]]})


def _layer_tensors(part: Part, fields: Fields, slots: Slots, layer: Layer) -> Slots | None:
  """{end of the key: array} of a layer; None where a slot has no tensor there."""
  fitting = [
    t
    for t in part.form.tensors
    if layer.kind in t.on and all(fields.get(k) == v for k, v in t.when.items())
  ]
  found = {t.key: t.theirs(slots[t.slot]) for t in fitting if t.slot in slots}
  held = {t.slot for t in fitting}
  made = set(_made(part, fields, layer))
  constant = {form.scale[1] for form in [part.form] if isinstance(form, PeftForm) and form.scale}
  if not found or set(slots) - held - made - constant:
    return None
  if made and not _same(slots, _made(part, fields, layer)):
    return None
  return found


def _made(part: Part, fields: Fields, layer: Layer) -> Slots:
  form = part.form
  if isinstance(form, PeftForm) and form.made:
    return form.made(fields, layer.sizes)
  return {}


def _same(slots: Slots, made: Slots) -> bool:
  return all(np.array_equal(slots[name], array) for name, array in made.items())


def _shared_tensors(main: Part, shared: Slots) -> Slots:
  return {t.key: t.theirs(shared[t.slot]) for t in main.form.shared}


def _config(
  main: Part,
  told: Mapping[str, Fields],
  shapes: Mapping[str, Mapping[str, tuple]],
  layers: Mapping[str, Layer],
) -> dict[str, Any] | None:
  """The config of the main part; None where layers differ in what PEFT has for all of them."""
  form = main.form
  assert isinstance(form, PeftForm)
  config: dict[str, Any] = {'peft_type': form.type, **form.marks}
  config['target_modules'] = target_names(told, among=layers)
  more = form.more(told, config['target_modules'], shapes) if form.more else {}
  if more is None:
    return None
  for field, key in form.keys.items():
    if key.name in more:
      continue
    each = {path: key.write(f[field]) if key.write else f[field] for path, f in told.items()}
    common = collections.Counter(map(repr, each.values())).most_common(1)[0][0]
    usual = next(value for value in each.values() if repr(value) == common)
    others = {re.escape(path): value for path, value in each.items() if value != usual}
    if others and not key.pattern:
      return None
    config[key.name] = usual
    if key.pattern:
      config[key.pattern] = others
  return config | more


def target_names(paths: Iterable[str], *, among: Iterable[str]) -> list[str]:
  """target_modules that selects exactly `paths` of the base's layers `among`, sorted.

  The last word where all layers of that name are adapted ('q_proj'), else the whole path.
  """
  paths = set(paths)
  others = {path.rpartition('.')[2] for path in among if path not in paths}
  words = {path: path.rpartition('.')[2] for path in paths}
  return sorted({path if word in others else word for path, word in words.items()})

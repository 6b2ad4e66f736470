"""The tensors of an HF PEFT folder <-> adapters and their arrays by layer, as forms declare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

import numpy as np

from peftlab import _adapter, _registry
from peftlab.formats import peft_config, peft_types
from peftlab.formats.peft_form import Beside, Fields, PeftForm, Slots, Tensor

PREFIX = 'base_model.model.'
COPY = 'base_layer.weight'  # of the frozen weight; PEFT puts it beside adapted embeddings

Values = dict[str, Slots]
Adapters = dict[str, _adapter.Adapter]


@dataclasses.dataclass(frozen=True)
class Layer:
  """What is to be known of a layer of the base: linear, embedding, norm or conv; (in, out)."""

  kind: str
  sizes: tuple[int, int]
  head: bool = False


Describe = Callable[[str], Layer | None]


def unknown(path: str) -> Layer | None:
  """A `Describe` where there is no base."""
  del path


@dataclasses.dataclass(frozen=True)
class Part:
  """Layers of one form: the main type's, or those of a type beside it."""

  kind: type[_adapter.Adapter]
  form: Any  # a PeftForm or a Beside

  @property
  def ends(self) -> list[str]:
    """How the names of its tensors end."""
    return [tensor.key for tensor in self.form.tensors]


def read(
  config: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray],
  *,
  subject: str,
  describe: Describe = unknown,
  card: Mapping[str, _adapter.Adapter] | None = None,
) -> tuple[Adapters, Values]:
  """(the adapter, the arrays) of every layer; under '' the arrays that all layers share.

  Args:
    config: complete.
    tensors: by PEFT's keys.
    subject: the start of every message.
    describe: a layer of the base by its path.
    card: the adapter of every layer as it was written, of types that share a form with PEFT's.

  Raises:
    ValueError: a key that is none of PEFT's, a layer that lacks a tensor or is not selected, shapes
      that disagree with one another or with the config.
  """
  kind, form = peft_types.of_config(config, subject=subject)
  main = Part(kind, form)
  beside = {k: Part(*v) for k, v in peft_types.besides().items() if config.get(k)}
  groups, shared = _grouped(tensors, main, beside, config, subject)
  adapters: Adapters = {}
  values: Values = {'': shared} if shared else {}
  for path, (part, arrays) in groups.items():
    where = f"{subject}: '{path}'"
    layer = describe(path)
    _check_copy(arrays.pop(COPY, None), layer, arrays, where)
    fields = _fields(part, config, path, arrays)
    slots = _slots(part, fields, arrays, layer, where)
    told = (card or {}).get(path)
    if told is None or part is not main:
      adapters[path] = part.kind(**fields)
    else:
      unpack = told.peft.unpack
      fields, slots = unpack(fields, slots) if unpack else (fields, slots)
      adapters[path] = dataclasses.replace(told, **fields)
    values[path] = slots
  _check_selected(config, groups, main, beside, subject)
  return adapters, values


def _grouped(
  tensors: Mapping[str, np.ndarray],
  main: Part,
  beside: Mapping[str, Part],
  config: Mapping[str, Any],
  subject: str,
) -> tuple[dict[str, tuple[Part, dict[str, np.ndarray]]], Slots]:
  """({path: (part, {end of the key: array})}, the shared slots)."""
  whole = {tensor.key: tensor for tensor in main.form.shared}
  shared = {t.slot: t.ours(tensors[key]) for key, t in whole.items() if key in tensors}
  missing = [tensor.key for tensor in whole.values() if tensor.slot not in shared]
  groups: dict[str, tuple[Part, dict[str, np.ndarray]]] = {}
  for key, array in tensors.items():
    if key in whole:
      continue
    copied = next((end for end in main.form.copies if key.endswith(f'.{end}')), None)
    if copied is not None:
      original = next((tensors[k] for k in whole if k.endswith(copied) and k in tensors), array)
      if not np.array_equal(original, array):
        raise ValueError(f"{subject}: '{key}' is not what all layers share.")
      continue
    part, path, end = _parse(key, main, beside, config, subject)
    groups.setdefault(path, (part, {}))[1][end] = array
  if missing:
    raise ValueError(f'{subject}: no {", ".join(missing)}, which all layers share.')
  if not any(part is main for part, _ in groups.values()):
    ends = ' and '.join(dict.fromkeys(main.ends))
    raise ValueError(f'{subject}: no tensors; expected {ends} of at least one layer.')
  return groups, shared


def _parse(
  key: str,
  main: Part,
  beside: Mapping[str, Part],
  config: Mapping[str, Any],
  subject: str,
) -> tuple[Part, str, str]:
  """(the part, the layer's path, the end) of a key."""
  for end in sorted({*main.ends, COPY}, key=len, reverse=True):
    if key.startswith(PREFIX) and key.endswith(f'.{end}'):
      return main, key.removeprefix(PREFIX).removesuffix(f'.{end}'), end
  for name, part in beside.items():
    for end in sorted(part.ends, key=len, reverse=True):
      path = key.removeprefix(PREFIX).removesuffix(f'.{end}')
      if key == f'{PREFIX}{path}.{end}' and part.form.fields(config[name], path) is not None:
        return part, path, end
  for _, form in peft_types.forms():
    if form.type == config['peft_type'] and any(key.endswith(f'.{t.key}') for t in form.tensors):
      marks = ', '.join(f'{k} = {v!r}' for k, v in form.marks.items()) or 'a plain config'
      has = ', '.join(f'{k} = {config.get(k)!r}' for k in form.marks)
      raise ValueError(f"{subject}: The key '{key}' belongs to {marks}; the config has {has}.")
  near = _registry.did_you_mean('.'.join(key.split('.')[-2:]), main.ends)
  raise ValueError(
    f"{subject}: The key '{key}' is not one of PEFT's{near or '.'} Expected {PREFIX}PATH. and one "
    f'of: {", ".join(dict.fromkeys(main.ends))}.'
  )


def _fields(
  part: Part, config: Mapping[str, Any], path: str, arrays: Mapping[str, np.ndarray]
) -> Fields:
  """The fields of the adapter of a layer."""
  if isinstance(part.form, Beside):
    return dict(part.form.fields(config[part.form.key], path) or {})
  fields = peft_config.fields_at(config, part.form, path)
  if part.form.at:
    fields |= part.form.at(config, path, {end: array.shape for end, array in arrays.items()})
  return fields


def _slots(
  part: Part,
  fields: Fields,
  arrays: Mapping[str, np.ndarray],
  layer: Layer | None,
  where: str,
) -> Slots:
  """{slot: array} of a layer."""
  adapter = part.kind(**fields)
  found = _tensors(part, fields, layer, arrays)
  needed = [t.key for t in found if not t.optional and t.key not in arrays]
  spare = [end for end in arrays if end not in {t.key for t in found}]
  if needed or spare:
    wanted = ' and '.join(tensor.key for tensor in found)
    raise ValueError(f'{where} has {", ".join(sorted(arrays))}; expected {wanted}.')
  held = [tensor for tensor in found if tensor.key in arrays]
  _check_shapes(held, fields, arrays, part.form, where)
  slots = {tensor.slot: tensor.ours(arrays[tensor.key]) for tensor in held}
  if isinstance(part.form, PeftForm):
    slots = {t.slot: _filled(slots[t.slot], t, fields, part.form) for t in held}
    if part.form.made and layer is not None:
      slots |= part.form.made(fields, layer.sizes)
  return slots | _constants(adapter, slots)


def _tensors(
  part: Part, fields: Fields, layer: Layer | None, arrays: Mapping[str, Any]
) -> list[Tensor]:
  """The tensors of a layer with some fields; without a base, the kind that most of them fit."""
  fitting = [t for t in part.form.tensors if all(fields.get(k) == v for k, v in t.when.items())]
  kinds = dict.fromkeys(kind for tensor in fitting for kind in tensor.on)
  if layer is not None and layer.kind in kinds:
    return [t for t in fitting if layer.kind in t.on]
  by_kind = [[t for t in fitting if kind in t.on] for kind in kinds]
  return max(by_kind, key=lambda some: sum(t.key in arrays for t in some), default=[])


def _check_shapes(
  held: list[Tensor],
  fields: Fields,
  arrays: Mapping[str, np.ndarray],
  form: PeftForm | Beside,
  where: str,
) -> None:
  """Every word of the layouts has one size: that of the field of its name, if there is one."""
  cut = form.cut if isinstance(form, PeftForm) else ()
  sizes = {k: v for k, v in fields.items() if type(v) is int and k not in cut}
  known = dict(sizes)
  fits = True
  for tensor in held:
    shape, words = arrays[tensor.key].shape, tensor.words
    fits = fits and len(shape) == len(words)
    for word, size in zip(words, shape, strict=False):
      wanted = int(word) if word.isdigit() else known.setdefault(word, size)
      fits = fits and size == wanted and (word not in cut or size <= fields[word])
  if fits:
    return
  told = [w for w in dict.fromkeys(w for t in held for w in t.words) if w in sizes]
  given = ' and '.join(f'{t.key} {arrays[t.key].shape}' for t in held)
  by = f'; by the config its {", ".join(f"{w} is {sizes[w]}" for w in told)}' if told else ''
  shown = {**{str(n): n for n in range(10)}, **sizes}
  wanted = ' and '.join(
    f'{t.key} ({", ".join(str(shown.get(w, w)) for w in t.words)})' for t in held
  )
  raise ValueError(f'{where} has {given}{by}: expected {wanted}.')


def _filled(array: np.ndarray, tensor: Tensor, fields: Fields, form: PeftForm) -> np.ndarray:
  """Zeros for what the file holds less of than the fields say."""
  words = tensor.layout.partition('->')[0].split()
  short = [fields[w] - n if w in form.cut else 0 for w, n in zip(words, array.shape, strict=True)]
  return np.pad(array, [(0, n) for n in short]) if any(short) else array


def _constants(adapter: _adapter.Adapter, slots: Slots) -> Slots:
  """Slots that are numbers of the fields, where the file does not hold them."""
  found = {name: constant_of(slot) for name, slot in adapter.slots().items() if name not in slots}
  return {name: np.asarray(np.float32(v)) for name, v in found.items() if v is not None}


def constant_of(slot: _adapter.Slot) -> float | None:
  """The number that a slot starts with and keeps, or None."""
  return getattr(slot.init, 'value', None) if slot.saved and not slot.trainable else None


def _check_copy(
  copy: np.ndarray | None, layer: Layer | None, arrays: Mapping[str, np.ndarray], where: str
) -> None:
  if copy is None:
    return
  sizes = layer.sizes if layer else None
  if not arrays or len(copy.shape) != 2 or (sizes and sorted(copy.shape) != sorted(sizes)):
    wanted = f'one of {sizes[::-1]}' if sizes else 'a matrix beside an adapter'
    raise ValueError(f'{where} has {COPY} {copy.shape}; expected {wanted}.')


def _check_selected(
  config: Mapping[str, Any],
  groups: Mapping[str, tuple[Part, Any]],
  main: Part,
  beside: Mapping[str, Part],
  subject: str,
) -> None:
  """The keys of the config name the layers of the tensors, and no others."""
  own = [path for path, (part, _) in groups.items() if part is main]
  peft_config.check_targets(config, own, subject=subject)
  for key, part in beside.items():
    named = [path for path, (p, _) in groups.items() if p is part]
    given = config[key] if isinstance(config[key], list) else [config[key]]
    idle = [v for v in given if not any(part.form.fields([v], path) is not None for path in named)]
    if idle or not named:
      raise ValueError(
        f'{subject} has {key} = {config[key]!r}, which names no layer with tensors for '
        f'{", ".join(map(repr, idle or given))}.'
      )


def integer_ends(config: Mapping[str, Any], *, subject: str) -> tuple[str, ...]:
  """How the keys of tensors end that hold whole numbers."""
  _, form = peft_types.of_config(config, subject=subject)
  return tuple(tensor.key for tensor in form.tensors if tensor.integer)


def missing(
  config: Mapping[str, Any], adapters: Iterable[str], layers: Mapping[str, Layer], *, subject: str
) -> list[str]:
  """The layers of a base that a config selects and that have no adapter."""
  _, form = peft_types.of_config(config, subject=subject)
  kinds = {kind for tensor in form.tensors for kind in tensor.on}
  held = set(adapters)
  return [
    path
    for path, layer in layers.items()
    if path not in held
    and layer.kind in kinds
    and peft_config.targets(config, path, head=layer.head)
  ]

"""HF PEFT folders of virtual tokens: one table, the rows of all points of a role side by side."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any
import warnings

import numpy as np

from peftlab import _adapter, _registry
from peftlab.formats import files, hf_peft, layer_names
from peftlab.formats.safetensors_file import SafetensorsFile, write_safetensors

TENSOR = 'prompt_embeddings'  # [virtual tokens, features of all points]
_COMMON = ('auto_mapping', 'base_model_name_or_path', 'inference_mode', 'modules_to_save')
_COMMON += ('num_attention_heads', 'num_layers', 'num_transformer_submodules', 'peft_type')
_COMMON += ('num_virtual_tokens', 'peft_version', 'revision', 'task_type', 'token_dim')
_PLAIN = {'num_transformer_submodules': (1, None), 'modules_to_save': (None, [])}

Values = dict[str, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsForm:
  """How PEFT 0.21.2 writes a type whose only slot `slot` holds rows [count, out].

  Attributes:
    types: peft_type in adapter_config.json; those behind the first are read only.
    count: the field that says how many rows.
    slot: of the rows.
    keys: of the config that say nothing of what the table means, with what is written.
    neutral: others that are read and not written.
  """

  types: tuple[str, ...]
  count: str = 'count'
  slot: str = 'rows'
  keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  neutral: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Table:
  """Where in the table the rows of each point are: features by layer, in order."""

  features: dict[str, int]
  heads: int
  kinds: int

  @classmethod
  def of(cls, places: list[layer_names.Place]) -> _Table:
    """Of the points of one role: by layer, keys before values."""
    ordered = sorted(places, key=lambda p: _order(p.name))
    words = {layer_names.canonical(p.name)[0] for p in places}
    site = ordered[0].site
    outs = [n for n, w in zip(site.shape, site.layout.words, strict=True) if w == 'out']
    heads = outs[0] if len(outs) > 1 else 1
    return cls({p.name: p.site.sizes['out'] for p in ordered}, heads, len(words))

  @property
  def width(self) -> int:
    """Columns."""
    return sum(self.features.values())


def _order(name: str) -> tuple:
  """By which points follow one another: layers by number, keys before values."""
  return layer_names.canonical(name)[1], name


def form_of(peft_type: Any) -> tuple[type[_adapter.Adapter], RowsForm] | None:
  """The type that reads a peft_type, and its form."""
  types = [_registry.adapters.get(name) for name in _registry.adapters.names()]
  found = [(kind, kind.peft_rows) for kind in types if kind.peft_rows]
  return next(((kind, form) for kind, form in found if peft_type in form.types), None)


def write(
  adapters: Mapping[str, _adapter.Adapter],
  values: Values,
  known: Mapping[layer_names.Key, layer_names.Place],
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
  """(config, tensors) of PEFT's folder; None: PEFT has no form of this."""
  first, *others = set(adapters.values())
  form = type(first).peft_rows
  if form is None or others or set(first.slots()) != {form.slot}:
    return None
  places = [p for p in known.values() if p.site.point == first.point]
  table = _Table.of(places)
  if set(table.features) != set(adapters):
    return None  # PEFT puts them at every point
  rows = np.concatenate([values[name][form.slot] for name in table.features], axis=1)
  config = {
    'peft_type': form.types[0],
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': None,
    'inference_mode': True,
    'num_virtual_tokens': rows.shape[0],
    'token_dim': next(iter(table.features.values())),
    'num_transformer_submodules': 1,
    'num_attention_heads': table.heads,
    'num_layers': len(table.features) // table.kinds,
    **form.keys,
  }
  return config, {TENSOR: rows}


def write_folder(
  directory: pathlib.Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes adapter_model.safetensors and adapter_config.json into a new folder."""
  write_safetensors(directory / hf_peft.TENSORS, tensors, metadata={'format': 'pt'})
  files.write_json(directory / hf_peft.CONFIG, dict(config))


def read(
  directory: pathlib.Path,
  known: Mapping[layer_names.Key, layer_names.Place] | None,
  *,
  card: Mapping[str, Mapping[str, list[int]]] | None = None,
) -> tuple[dict[str, _adapter.Adapter], Values] | None:
  """(the adapter, the rows) of every point; None: the folder is of another kind of type.

  Args:
    directory: of the folder.
    known: the layers of the base, by which the table is cut.
    card: {layer: {slot: shape}} of our own card, by which it is cut where there is one.

  Raises:
    ValueError: a table that does not fit the config or the base, a NaN or infinity, a key that
      changes what the table means.
  """
  config = files.read_json(directory / hf_peft.CONFIG)
  found = form_of(config.get('peft_type'))
  if found is None:
    return None
  kind, form = found
  subject = f"PEFT folder '{directory}'"
  _check_config(config, form, subject)
  if not (directory / hf_peft.TENSORS).is_file():
    for name in files.pickles_in(directory):
      files.refuse_pickle(directory / name)
  rows = _rows(dict(SafetensorsFile(directory / hf_peft.TENSORS)), config, subject)
  if card is not None:
    features = {layer: card[layer][form.slot][1] for layer in sorted(card, key=_order)}
  else:
    places = [p for p in (known or {}).values() if p.site.point == kind.point]
    if not places:
      raise ValueError(f"{subject}: the model has no point of the role '{kind.point}'.")
    features = _Table.of(places).features
  if rows.shape[1] != sum(features.values()):
    raise ValueError(
      f'{subject} has {TENSOR} {rows.shape}; the {len(features)} points of the model have '
      f'{sum(features.values())} features.'
    )
  fields: dict[str, Any] = {form.count: rows.shape[0]}
  adapter, values, start = kind(**fields), {}, 0
  for layer, size in features.items():
    values[layer] = {form.slot: rows[:, start : start + size]}
    start += size
  return dict.fromkeys(values, adapter), values


def _check_config(config: Mapping[str, Any], form: RowsForm, subject: str) -> None:
  for key, plain in _PLAIN.items():
    if config.get(key) not in plain:
      raise ValueError(
        f'{subject} has {key} = {config[key]!r}, which peftlab does not read. Expected '
        f'{plain[0]!r}.'
      )
  known = (*_COMMON, *form.keys, *form.neutral)
  unknown = [key for key in config if key not in known]
  if unknown:
    near = _registry.did_you_mean(unknown[0], known)
    warnings.warn(
      f'{subject} has the unknown field {unknown[0]!r}{near or "."} It is ignored.', stacklevel=3
    )


def _rows(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], subject: str) -> np.ndarray:
  """The table [virtual tokens, features]."""
  if set(tensors) != {TENSOR}:
    raise ValueError(f'{subject} has the tensors {sorted(tensors)}; expected {TENSOR}.')
  rows = tensors[TENSOR]
  count = config.get('num_virtual_tokens')
  if rows.ndim != 2 or rows.shape[0] != count:
    raise ValueError(
      f'{subject} has {TENSOR} {rows.shape}; by the config it has {count} virtual tokens.'
    )
  if not np.isfinite(rows.astype(np.float32)).all():
    raise ValueError(f'{subject}: {TENSOR} holds a NaN or an infinity.')
  return rows

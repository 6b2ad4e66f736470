"""How HF PEFT writes an adapter type. A type declares it; `peft_values` reads and writes by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
import re
from typing import Any

import einops
import numpy as np

REQUIRED = object()  # the default of a key that a config must have
MATRICES = ('linear', 'embedding')  # kinds of layers; the third is 'norm', the fourth 'conv'

Fields = dict[str, Any]
Slots = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """A key of adapter_config.json that holds a field of an adapter type.

  Attributes:
    name: of the key.
    default: PEFT's own, for a config that lacks it.
    least: the smallest value.
    below: above the largest value.
    pattern: the key of {regex of layers: value of this field there}, or ''.
    read: the field of the key's value; a value that it raises ValueError for is refused.
    write: its inverse.
  """

  name: str
  default: Any = REQUIRED
  least: float = -math.inf
  below: float = math.inf
  pattern: str = ''
  read: Callable[[Any], Any] | None = None
  write: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of adapter_model.safetensors that holds a slot.

  Attributes:
    slot: of the adapter type.
    key: what stands behind the layer's path; of a shared slot the whole key.
    layout: our dims and PEFT's, in the words of einops: 'in rank -> rank in'.
    on: kinds of layers that have it.
    when: {field: value} of the adapters that have it.
    optional: whether a layer may lack it (what it must have is checked against the model).
    turned: whether the first axis runs the other way there.
    integer: whether it holds whole numbers.
  """

  slot: str
  key: str
  layout: str
  _: dataclasses.KW_ONLY
  on: tuple[str, ...] = MATRICES
  when: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  optional: bool = False
  turned: bool = False
  integer: bool = False

  @property
  def words(self) -> tuple[str, ...]:
    """PEFT's dims."""
    return tuple(self.layout.partition('->')[2].split())

  def theirs(self, array: np.ndarray) -> np.ndarray:
    """A slot as PEFT stores it."""
    found = _rearranged(np.asarray(array), self.layout)
    return found[::-1] if self.turned else found

  def ours(self, array: np.ndarray) -> np.ndarray:
    """Inverse of `theirs`."""
    ours, _, theirs = self.layout.partition('->')
    return _rearranged(array[::-1] if self.turned else array, f'{theirs} -> {ours}')


def _rearranged(array: np.ndarray, layout: str) -> np.ndarray:
  return einops.rearrange(array, re.sub(r'\bin\b', 'ins', layout))  # `in` is a word of Python


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
  """How a type is written beside a main one, on layers of its own: PEFT's modules_to_save.

  Attributes:
    key: of the config.
    tensors: of a layer.
    fields: (value of the key, path of a layer) -> fields of its adapter, None: it is not named.
    value: {path: fields} -> the value of the key.
    written: the fields that `fields` gives.
  """

  key: str
  tensors: tuple[Tensor, ...]
  fields: Callable[[Any, str], Fields | None]
  value: Callable[[Mapping[str, Fields]], Any]
  written: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftForm:
  """How PEFT 0.21.2 writes an adapter type.

  Slots that are constants of the fields (a scale) and slots that are not saved have no tensor.

  Attributes:
    type: peft_type in adapter_config.json.
    keys: {field: its key}.
    tensors: of a layer.
    shared: tensors that the file has once.
    copies: ends of keys under which PEFT puts a shared tensor beside every layer once more.
    marks: {key: value} that a config must have to be of this type; others of the same peft_type
      have other values of these keys.
    fixed: {key: values} that change what the tensors mean, where only these values are known; a key
      that is left out has the first.
    neutral: keys that say nothing of what the tensors mean.
    training: keys of what this type does not do in training (a dropout); a value is warned of.
    starts: {key: values} after which the base is as it was; after others the tensors belong to
      another base.
    scale: (field, slot): the slot is the field times a number that the other fields give.
    padded: fields whose size zeros can fill up, so that layers of one stack may have several.
    cut: fields of which a layer may hold fewer than the config says; zeros are put for the rest.
    besides: keys of what may be written beside it.
    at: (config, path, {tensor key: shape}) -> more fields of a layer, for what no key says alone.
    more: ({path: fields}, target_modules, {path: {tensor key: shape}}) -> more keys of the config;
      None: PEFT cannot write these layers together.
    made: (fields, (in, out)) -> slots that PEFT does not store.
    pack: (fields, slots) -> those of the plainer type of the same form that is the same.
    unpack: inverse of `pack`.
  """

  type: str
  keys: Mapping[str, Key] = dataclasses.field(default_factory=dict)
  tensors: tuple[Tensor, ...] = ()
  shared: tuple[Tensor, ...] = ()
  copies: tuple[str, ...] = ()
  marks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
  neutral: tuple[str, ...] = ()
  training: tuple[str, ...] = ()
  starts: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
  scale: tuple[str, str] | None = None
  padded: tuple[str, ...] = ()
  cut: tuple[str, ...] = ()
  besides: tuple[str, ...] = ('modules_to_save',)
  at: Callable[[Mapping[str, Any], str, Mapping[str, tuple]], Fields] | None = None
  more: Callable[[Mapping[str, Fields], list[str], Mapping[str, Mapping]], Fields | None] | None = (
    None
  )
  made: Callable[[Fields, tuple[int, int]], Slots] | None = None
  pack: Callable[[Fields, Slots], tuple[Fields, Slots]] | None = None
  unpack: Callable[[Fields, Slots], tuple[Fields, Slots]] | None = None

  @property
  def names(self) -> frozenset[str]:
    """Every key of the config that this type knows."""
    patterns = {key.pattern for key in self.keys.values() if key.pattern}
    own = {key.name for key in self.keys.values()}
    told = (*self.marks, *self.fixed, *self.neutral, *self.training, *self.starts, *self.besides)
    return frozenset({*own, *patterns, *told})

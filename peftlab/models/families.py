"""What a model family is: its config and the names of its weights in each file format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import re
from typing import Any

import numpy as np

from peftlab import _registry
from peftlab.formats.hf_views import PlainView
from peftlab.models.config import DecoderConfig

_NEEDED = object()
MOST_LAYERS = 2**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMap:
  """Names of a family's tensors in one file format.

  Attributes:
    modules: our module ('layers.attn.q') -> the file's ('model.layers.{layer}.self_attn.q_proj');
      with '{expert}' where each expert has a tensor of its own.
    suffixes: our array of a module ('kernel') -> what follows the file's module ('.weight').
    arrays: our array ('layers.attn.sinks') -> the file's whole name, where it is no such pair.
    out_first: a matrix lies as [out, in] in the file, not as [in, out].
    in_first: modules whose matrices nevertheless lie as [in, out].
    change: `change(path, array, config) -> array` on a file's array, before its dimensions are
      brought into ours.
    ignored: patterns of tensors that hold nothing to load (full match).
    unread: further such patterns, that depend on the config.
  """

  modules: Mapping[str, str]
  suffixes: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {
      'kernel': '.weight',
      'scale': '.weight',
      'table': '.weight',
      'bias': '.bias',
    }
  )
  arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)
  out_first: bool = True
  in_first: tuple[str, ...] = ()
  change: Callable[[str, np.ndarray, DecoderConfig], np.ndarray] = lambda path, array, config: array
  ignored: tuple[str, ...] = ()
  unread: Callable[[DecoderConfig], tuple[str, ...]] = lambda config: ()

  def name(self, path: str) -> str:
    """The file's name of our array 'layers.attn.q.kernel', with '{layer}' where there is one."""
    if path in self.arrays:
      return self.arrays[path]
    module, _, leaf = path.rpartition('.')
    return self.modules[module] + self.suffixes[leaf]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """How one file format tells a family's config, and the names of its weights.

  Attributes:
    config: `config(source) -> DecoderConfig`, from a reader in `peftlab.formats`.
    weights: the names.
    view: what the tensors of a reader mean, where that is not what they are: other names, codes.
  """

  config: Callable[[Any], DecoderConfig]
  weights: WeightMap
  view: Callable[[Any], Any] = PlainView


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A model family.

  Attributes:
    formats: 'hf', 'gguf' or 'npz' -> Format.
    model_types: `model_type` in config.json that means this family.
    architectures: `general.architecture` in GGUF that means it.
    sizes: the named models of the family -> the fields of their config.json.
  """

  formats: Mapping[str, Format]
  model_types: tuple[str, ...] = ()
  architectures: tuple[str, ...] = ()
  sizes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

  @property
  def adapter_modules(self) -> Mapping[str, str]:
    """Module names under which adapters of this family are exchanged: the HF ones if it has any."""
    chosen = self.formats.get('hf') or next(iter(self.formats.values()))
    return chosen.weights.modules


class Fields:
  """A config read strictly: each field is taken once, and what nobody took is an error.

  Args:
    values: the config.
    subject: where it comes from, for messages.
  """

  def __init__(self, values: Mapping[str, Any], subject: str):
    self._values = values
    self._taken: set[str] = set()
    self.subject = subject

  def take(self, name: str, kind: type | tuple[type, ...], default: Any = _NEEDED) -> Any:
    """The field `name`; `default` where it is absent or null.

    Raises:
      ValueError: it is absent without a default, or has another type.
    """
    self._taken.add(name)
    value = self._values.get(name)
    if value is None:
      if default is _NEEDED:
        near = _registry.did_you_mean(name, [key for key in self._values if key != name])
        raise ValueError(f'{self.subject} has no {name!r}{near or "."}')
      return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if float in kinds and type(value) is int:
      value = float(value)
    if type(value) not in kinds:
      expected = ' or '.join(k.__name__ for k in kinds)
      raise ValueError(f'{self.subject} has {name!r} = {value!r}; expected {expected}.')
    return value

  def optional(self, name: str, kind: type | tuple[type, ...], absent: Any) -> Any:
    """The field `name`; None where it is null, `absent` where it is not there at all."""
    if name in self._values:
      return self.take(name, kind, None)
    self._taken.add(name)
    return absent

  def count(self, name: str, default: Any = _NEEDED, *, limit: int = 2**24) -> int:
    """The field `name` as a size, between 1 and `limit`.

    Raises:
      ValueError: it is absent without a default, no integer, or out of bounds.
    """
    value = self.take(name, int, default)
    if not 1 <= value <= limit:
      raise ValueError(f'{self.subject} has {name!r} = {value}; expected 1 to {limit}.')
    return value

  def choose(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
    """The choice that the field `name` stands for.

    Raises:
      ValueError: it is none of them; the message names the nearest.
    """
    given = self.take(name, str, default)
    if given not in choices:
      near = _registry.did_you_mean(given, choices)
      raise ValueError(
        f'{self.subject} has {name!r} = {given!r}, which is not supported{near or "."} Supported: '
        f'{", ".join(sorted(choices))}.'
      )
    return choices[given]

  def expect(self, name: str, *allowed: Any) -> None:
    """Raises ValueError where the field is present with a value that would change the maths."""
    self._taken.add(name)
    value = self._values.get(name)
    if value is not None and value not in allowed:
      wanted = ' or '.join(repr(a) for a in allowed) or 'nothing'
      raise ValueError(
        f'{self.subject} has {name!r} = {value!r}, which is not supported; expected {wanted}.'
      )

  def finish(self, harmless: Iterable[str] = ()) -> None:
    """Raises ValueError for a field that was not taken, is not off, and may change the maths.

    Args:
      harmless: patterns of fields (full match) that do not.
    """
    for name, value in self._values.items():
      if name in self._taken or value is None or value is False:
        continue
      if any(re.fullmatch(pattern, name) for pattern in harmless):
        continue
      near = _registry.did_you_mean(name, self._taken)
      raise ValueError(
        f'{self.subject} has {name!r} = {value!r:.80}, which is not supported{near or "."} Known '
        f'fields: {", ".join(sorted(self._taken))}.'
      )

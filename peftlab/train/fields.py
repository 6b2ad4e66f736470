"""Fields of a tree of frozen dataclasses: their types, docs, dotted names, and JSON both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import functools
import inspect
import json
import math
import re
import types
import typing
from typing import Any, Union

from peftlab import _registry

# The key that tells, in JSON and in a flag, which registered type a dataclass is of.
TYPE = 'type'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """A field that is not itself a dataclass: one flag.

  Attributes:
    name: dotted, from the root: 'adapter.rank'.
    value: what it holds.
    kind: its type.
    doc: what it means.
  """

  name: str
  value: Any
  kind: Any
  doc: str = ''


@functools.cache
def kinds(cls: type) -> dict[str, Any]:
  """{field: its type}, of a dataclass."""
  hints = typing.get_type_hints(cls)
  return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


@functools.cache
def docs(cls: type) -> dict[str, str]:
  """{field: its doc}, from the section `Attributes:` of the class's docstring."""
  text = inspect.cleandoc(cls.__doc__ or '')
  _, _, section = text.partition('\nAttributes:\n')
  found: dict[str, str] = {}
  names: list[str] = []
  for line in section.splitlines():
    start = re.match(r' +([a-z_0-9, ]+): (.*)', line) if re.match(r' {1,2}\S', line) else None
    if start:
      names = [name.strip() for name in start[1].split(',')]
      found |= dict.fromkeys(names, start[2].strip())
    elif line.strip():
      found |= {name: f'{found[name]} {line.strip()}' for name in names}
    else:
      break
  inherited = [docs(base) for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
  for more in inherited:
    found = more | found
  return {f.name: found.get(f.name, f.metadata.get('doc', '')) for f in dataclasses.fields(cls)}


def leaves(config: Any, prefix: str = '') -> Iterator[Leaf]:
  """Every leaf of a tree of dataclasses, in the order of the fields."""
  cls = type(config)
  for field in dataclasses.fields(cls):
    name, value = prefix + field.name, getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from leaves(value, f'{name}.')
    else:
      yield Leaf(name=name, value=value, kind=kinds(cls)[field.name], doc=docs(cls)[field.name])


def replace[T](config: T, changes: Mapping[str, Any]) -> T:
  """The tree with some leaves exchanged: {'adapter.rank': 4}. All of them are set at once.

  Raises:
    ValueError: no such field (with the nearest), or a value that a field cannot take.
  """
  known = [leaf.name for leaf in leaves(config)]
  for name in changes:
    if name not in known:
      near = _registry.did_you_mean(name, known)
      raise ValueError(f'No field {name!r}{near or "."} {_choices(name, known)}')
  return _replace(config, changes)


def _replace(config: Any, changes: Mapping[str, Any]) -> Any:
  own: dict[str, Any] = {name: v for name, v in changes.items() if '.' not in name}
  for outer in {name.partition('.')[0] for name in changes if '.' in name}:
    inner = {n.partition('.')[2]: v for n, v in changes.items() if n.startswith(f'{outer}.')}
    own[outer] = _replace(getattr(config, outer), inner)
  return dataclasses.replace(config, **own)


def _choices(name: str, known: list[str]) -> str:
  """The fields beside `name`, else the first words of all."""
  section = name.rpartition('.')[0]
  beside = [k.removeprefix(f'{section}.') for k in known if section and k.startswith(f'{section}.')]
  if beside:
    return f'Fields of {section}: {", ".join(beside)}.'
  return f'Fields: {", ".join(dict.fromkeys(k.split(".")[0] for k in known))}.'


def describe(kind: Any) -> str:
  """A type in the words of messages and of the help: 'int', 'float or none', 'str, ...'."""
  if kind is types.NoneType:
    return 'none'
  origin, inner = typing.get_origin(kind), typing.get_args(kind)
  if origin in (Union, types.UnionType):
    return ' or '.join(describe(k) for k in inner)
  if origin is tuple:
    return f'{describe(inner[0])}, ...'
  return getattr(kind, '__name__', str(kind))


def convert(name: str, value: Any, kind: Any) -> Any:
  """`value` as `kind` holds it: an int where a float is expected becomes one, a list a tuple.

  Raises:
    ValueError: it is of another type, or not finite.
  """
  origin, inner = typing.get_origin(kind), typing.get_args(kind)
  if origin in (Union, types.UnionType):
    if value is None and types.NoneType in inner:
      return None
    kind = next(k for k in inner if k is not types.NoneType)
  elif origin is tuple:
    if isinstance(value, (tuple, list)):
      return tuple(convert(name, item, inner[0]) for item in value)
  elif kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if kind not in (int, float, bool, str) and origin is not tuple:
    raise ValueError(f'{name} has the type {describe(kind)}, which no flag can hold.')
  if origin is tuple or type(value) is not kind:
    shown = f'{value!r} ({type(value).__name__})'
    raise ValueError(f'{name} is {shown}; expected {describe(kind)}.')
  if kind is float and not math.isfinite(value):
    raise ValueError(f'{name} is {value}; expected a finite number.')
  return value


def converted(config: Any, prefix: str = '') -> dict[str, Any]:
  """{field: its value as its type holds it} for every leaf of one dataclass (see `convert`)."""
  return {
    name: convert(prefix + name, getattr(config, name), kind)
    for name, kind in kinds(type(config)).items()
    if not dataclasses.is_dataclass(getattr(config, name))
  }


def check_choice(name: str, given: str, choices: Iterable[str]) -> None:
  """Raises ValueError unless `given` is one of `choices`; the message names the nearest."""
  choices = sorted(choices)
  if given not in choices:
    near = _registry.did_you_mean(given, choices)
    raise ValueError(f'{name} is {given!r}{near or "."} Choices: {", ".join(choices)}.')


def check_range(name: str, value: float, least: float, most: float = math.inf) -> None:
  """Raises ValueError unless `least <= value <= most`."""
  if not least <= value <= most:
    wanted = f'at least {least}' if most == math.inf else f'between {least} and {most}'
    raise ValueError(f'{name} is {value}; it must be {wanted}.')


def to_dict(config: Any) -> dict[str, Any]:
  """Nested dicts of plain values. A registered adapter says its type under the key 'type'."""
  result: dict[str, Any] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if not dataclasses.is_dataclass(value):
      result[field.name] = list(value) if isinstance(value, tuple) else value
      continue
    registry = field.metadata.get('registry')
    result[field.name] = {TYPE: registry.name_of(value)} if registry else {}
    result[field.name] |= to_dict(value)
  return result


def from_dict[T](cls: type[T], data: Any, *, subject: str = 'The config', prefix: str = '') -> T:
  """Inverse of `to_dict`; a field that is left out takes its default.

  Raises:
    ValueError: an unknown key, a value of the wrong type, an unknown adapter.
  """
  where = f'{subject}: {prefix.removesuffix(".")}' if prefix else subject
  if not isinstance(data, dict):
    raise ValueError(f'{where} is {data!r:.60}; expected an object with the fields of it.')
  kind: Any = cls
  fields = {f.name: f for f in dataclasses.fields(kind)}
  for key in data:
    if key not in fields:
      near = _registry.did_you_mean(key, fields)
      raise ValueError(f'{where} has no field {key!r}{near or "."} Fields: {", ".join(fields)}.')
  values: dict[str, Any] = {}
  for name, value in data.items():
    kind, registry = kinds(cls)[name], fields[name].metadata.get('registry')
    inner = f'{prefix}{name}.'
    if registry:
      values[name] = _from_registry(registry, value, subject, inner)
    elif dataclasses.is_dataclass(kind):
      values[name] = from_dict(kind, value, subject=subject, prefix=inner)
    else:
      values[name] = convert(f'{subject}: {prefix}{name}', value, kind)
  return cls(**values)


def _from_registry(registry: _registry.Registry, value: Any, subject: str, prefix: str) -> Any:
  if not isinstance(value, dict) or not isinstance(value.get(TYPE), str):
    name = prefix.removesuffix('.')
    raise ValueError(
      f'{subject}: {name} is {value!r:.60}; expected an object with a field {TYPE!r}.'
    )
  rest = {k: v for k, v in value.items() if k != TYPE}
  return from_dict(registry.get(value[TYPE]), rest, subject=subject, prefix=prefix)


def canonical(config: Any) -> str:
  """One line of JSON, equal for equal configs: what ids and digests are made of."""
  return json.dumps(to_dict(config), sort_keys=True, separators=(',', ':'), allow_nan=False)


def to_json(config: Any) -> str:
  """JSON for people: indented, in the order of the fields."""
  return json.dumps(to_dict(config), indent=2, allow_nan=False) + '\n'


def from_json[T](cls: type[T], text: str, *, subject: str = 'The config') -> T:
  """Inverse of `to_json` and of `canonical`.

  Raises:
    ValueError: not JSON, or see `from_dict`.
  """
  try:
    data = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f'{subject} is not JSON: {error}.') from error
  return from_dict(cls, data, subject=subject)


def differences(one: Any, other: Any) -> list[str]:
  """The dotted names of the leaves in which two dicts of `to_dict` differ."""
  if isinstance(one, dict) and isinstance(other, dict):
    names = []
    for key in dict.fromkeys([*one, *other]):
      missing = object()
      inner = differences(one.get(key, missing), other.get(key, missing))
      names += [f'{key}.{name}' if name else key for name in inner]
    return names
  return [] if one == other and type(one) is type(other) else ['']

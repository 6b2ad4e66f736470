"""Adapters by pattern, in the words of a flag: 'mlp=dora(rank=16)', 'attn.q:rank=4'."""

from __future__ import annotations

from collections.abc import Sequence
import re
import typing
from typing import Any

from peftlab import _registry
from peftlab.train import fields

_ADAPTER = re.compile(r'(?P<where>.+)=(?P<type>[\w-]+)(?:\((?P<fields>.*)\))?')
_FORM = "PATTERN=TYPE or PATTERN=TYPE(FIELD=VALUE, ...), 'mlp=dora(rank=16)' for example."
_FIELD = re.compile(r'(?P<where>.+):(?P<field>\w+)=(?P<value>.*)')


def adapters(given: Sequence[str], *, name: str = 'adapters') -> dict[str, Any]:
  """('mlp=dora(rank=16, alpha=8)',) -> {'mlp': DoRA(rank=16, alpha=8.0)}, the rest its defaults.

  Raises:
    ValueError: words of another form, a pattern that is given twice, no such type or field (with
      the nearest), or a value that the field does not take.
  """
  found: dict[str, Any] = {}
  for words in given:
    match = _ADAPTER.fullmatch(words)
    if words.count('(') != words.count(')'):
      raise ValueError(f'{name} has {words!r}, whose brackets do not match; expected {_FORM}')
    if match is None:
      raise ValueError(f'{name} has {words!r}; expected {_FORM}')
    if match['where'] in found:
      raise ValueError(f'{name} has the pattern {match["where"]!r} twice: {", ".join(given)}.')
    subject = f'{name} has {words!r}'
    try:
      kind = _registry.adapters.get(match['type'])
    except ValueError as error:
      raise ValueError(f'{subject}: {error}') from None
    told = dict(_pair(item, subject) for item in split(match['fields'] or ''))
    found[match['where']] = _made(kind, told, subject)
  return found


def by_field(given: Sequence[str], adapters: Sequence[Any]) -> dict[str, dict[str, Any]]:
  """('attn.q:rank=4',) -> {'rank': {'attn.q': 4}}: what `attach` takes as `fields`.

  Args:
    given: PATTERN:FIELD=VALUE, the first that names a layer wins, each field on its own.
    adapters: those of the experiment; one at least has the field.

  Raises:
    ValueError: words of another form, a pattern twice for a field, no such field (with the
      nearest), or a value that it does not take.
  """
  found: dict[str, dict[str, Any]] = {}
  for words in given:
    match = _FIELD.fullmatch(words)
    if match is None:
      raise ValueError(
        f"patterns has {words!r}; expected PATTERN:FIELD=VALUE, 'attn.q:rank=4' for example."
      )
    subject, field = f'patterns has {words!r}', match['field']
    kinds = [k for k in map(type, adapters) if field in fields.kinds(k)]
    if not kinds:
      known = sorted({name for one in adapters for name in fields.kinds(type(one))})
      near = _registry.did_you_mean(field, known)
      raise ValueError(
        f'{subject}, but no adapter has a field {field!r}{near or "."} Fields: {", ".join(known)}.'
      )
    table = found.setdefault(field, {})
    if match['where'] in table:
      raise ValueError(f'{subject}, and another value for that pattern.')
    kind = fields.kinds(kinds[0])[field]
    table[match['where']] = fields.convert(subject, _value(match['value'], kind), kind)
  return found


def split(text: str) -> list[str]:
  """The items between commas that are not inside brackets."""
  items, depth, start = [], 0, 0
  for at, letter in enumerate(text):
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and depth == 0:
      items.append(text[start:at])
      start = at + 1
  return [item.strip() for item in [*items, text[start:]] if item.strip()]


def _pair(item: str, subject: str) -> tuple[str, str]:
  field, equals, value = item.partition('=')
  if not equals:
    raise ValueError(f'{subject}: {item!r} is not FIELD=VALUE.')
  return field.strip(), value.strip()


def _made(kind: type, told: dict[str, str], subject: str) -> Any:
  known = fields.kinds(kind)
  for field in told:
    if field not in known:
      near = _registry.did_you_mean(field, known)
      raise ValueError(
        f'{subject}: no field {field!r}{near or "."} Fields of {_registry.adapters.name_of(kind)}: '
        f'{", ".join(known)}.'
      )
  values = {
    field: fields.convert(f'{subject}: {field}', _value(text, known[field]), known[field])
    for field, text in told.items()
  }
  try:
    return kind(**values)
  except ValueError as error:
    raise ValueError(f'{subject}: {error}') from None


def _value(text: str, kind: Any) -> Any:
  """What a word means where a field of that type is expected; the word itself where it is none."""
  if typing.get_origin(kind) is tuple:
    inner = typing.get_args(kind)[0]
    return tuple(_value(item, inner) for item in split(text.strip('()')))
  if kind is bool:
    return {'true': True, 'false': False}.get(text.lower(), text)
  for number in (int, float):
    try:
      return number(text) if kind in (int, float) else text
    except ValueError:
      continue
  return text

"""Which registered adapter types HF PEFT has, and which of them a config means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peftlab import _adapter, _registry
from peftlab.formats.peft_form import REQUIRED, Beside, PeftForm

Kind = type[_adapter.Adapter]


def forms() -> list[tuple[Kind, PeftForm]]:
  """(type, its form); those that only inherit a form come last, for reading never prefers them."""
  types = [_registry.adapters.get(name) for name in _registry.adapters.names()]
  found = [(kind, kind.peft) for kind in types if kind.peft is not None]
  return sorted(found, key=lambda pair: ('peft' not in vars(pair[0])) + bool(pair[1].pack))


def besides() -> dict[str, tuple[Kind, Beside]]:
  """{key of a config: (the type of the layers that it names, how they are written)}."""
  types = [_registry.adapters.get(name) for name in _registry.adapters.names()]
  return {kind.peft_beside.key: (kind, kind.peft_beside) for kind in types if kind.peft_beside}


def of_config(config: Mapping[str, Any], *, subject: str) -> tuple[Kind, PeftForm]:
  """The type that a config means: of its peft_type, the one with whose marks it agrees best.

  Raises:
    ValueError: no type reads that peft_type; the message has the nearest one.
  """
  given = config.get('peft_type')
  known = forms()
  same = [(kind, form) for kind, form in known if form.type == given]
  if not same:
    types = sorted({form.type for _, form in known})
    near = _registry.did_you_mean(str(given), types)
    raise ValueError(
      f'{subject} has peft_type {given!r}{near or "."} Expected one of: {", ".join(types)}.'
    )
  return min(same, key=lambda pair: len(wrong(config, pair[1])))


def wrong(config: Mapping[str, Any], form: PeftForm) -> list[str]:
  """The keys that a form does not read with the values they have in a config."""
  missed = [key for key, value in form.marks.items() if not _same(config.get(key), value)]
  needed = [key.name for key in form.keys.values() if key.default is REQUIRED]
  missed += [name for name in needed if config.get(name) is None]
  odd = [k for k, values in form.fixed.items() if k in config and not _in(config[k], values)]
  others = [key for key in besides() if config.get(key) and key not in form.besides]
  return [*missed, *odd, *others]


def _same(given: Any, value: Any) -> bool:
  """Equal, and not 1 for True."""
  return type(given) is type(value) and given == value


def _in(given: Any, values: tuple) -> bool:
  return any(_same(given, value) for value in values)

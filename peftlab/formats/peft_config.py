"""adapter_config.json of HF PEFT: checked, completed, and resolved per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import math
import re
from typing import Any
import warnings

from peftlab._registry import did_you_mean
from peftlab.formats import peft_types
from peftlab.formats.peft_form import REQUIRED, Key, PeftForm

# The keys that every type has or may have, with what their absence means.
COMMON: dict[str, Any] = {
  'task_type': 'CAUSAL_LM',
  'base_model_name_or_path': None,
  'revision': None,
  'inference_mode': True,
  'target_modules': None,
}
_OPTIONAL: dict[str, Any] = {  # written where they say something
  'exclude_modules': None,
  'layers_to_transform': None,
  'layers_pattern': None,
  'fan_in_fan_out': False,
  'bias': 'none',
}
_NEUTRAL = ('auto_mapping', 'peft_version')
_PLAIN_ONLY: dict[str, tuple] = {'bias': ('none',)}


def check_config(config: Mapping[str, Any], *, subject: str, strict: bool) -> dict[str, Any]:
  """`config` with PEFT's defaults filled in, every key that matters checked.

  Args:
    config: the keys; `peft_type` and those without a default are needed.
    subject: the start of every message, such as "PEFT config 'DIR/adapter_config.json'".
    strict: a key that PEFT 0.21.2 does not have is an error (our own writing); otherwise it is
      warned about (a file from a later version).

  Raises:
    ValueError: another peft_type, a missing or ill-typed key, a value whose meaning we lack.
  """
  kind, form = peft_types.of_config(config, subject=subject)
  _check_unknown(config, form, subject, strict)
  full: dict[str, Any] = {'peft_type': form.type, **COMMON, **_OPTIONAL}
  for key in form.keys.values():
    full[key.name] = None if key.default is REQUIRED else key.default
    full |= {key.pattern: {}} if key.pattern else {}
  full |= config
  for key in form.keys.values():
    if key.pattern and full[key.pattern] is None:
      full[key.pattern] = {}
  _check_common(full, subject)
  types = {field.name: field.type for field in dataclasses.fields(kind)}
  for field, key in form.keys.items():
    _check_key(full, key, _word(types[field]), subject)
  _check_meaning(full, form, subject)
  return full


def written(config: Mapping[str, Any]) -> dict[str, Any]:
  """A full config without the keys that say nothing, for a file."""
  return {k: v for k, v in config.items() if k not in _OPTIONAL or v != _OPTIONAL[k]}


def fields_at(config: Mapping[str, Any], form: PeftForm, path: str) -> dict[str, Any]:
  """The fields of the adapter at a layer ('model.layers.0.self_attn.q_proj'), as the keys say."""
  found = {}
  for field, key in form.keys.items():
    table = config[key.pattern] if key.pattern else {}
    value = _by_pattern(table, path, config[key.name])
    found[field] = key.read(value) if key.read else value
  return found


def targets(config: Mapping[str, Any], path: str, *, head: bool = False) -> bool:
  """Whether the config selects a layer, as PEFT does: its name, less what is excluded or saved.

  Args:
    config: complete.
    path: of the layer.
    head: whether it is the model's head, which 'all-linear' leaves alone.
  """
  excluded, saved = config.get('exclude_modules'), config.get('modules_to_save')
  if excluded and _names(excluded, path):
    return False
  if saved and any(re.match(rf'(^|.*\.){name}($|\..*)', path) for name in saved):
    return False
  chosen = config['target_modules']
  if isinstance(chosen, str):
    return not head if chosen == 'all-linear' else _names(chosen, path)
  if path in chosen:
    return True
  return _names(chosen, path) and _in_layers(config, path)


def _names(chosen: str | Iterable[str], path: str) -> bool:
  """By regex of the whole path, or by suffix of whole words."""
  if isinstance(chosen, str):
    return re.fullmatch(chosen, path) is not None
  return any(path == suffix or path.endswith(f'.{suffix}') for suffix in chosen)


def _in_layers(config: Mapping[str, Any], path: str) -> bool:
  """Whether the number of the layer is one of layers_to_transform, the first behind a pattern."""
  wanted, patterns = config.get('layers_to_transform'), config.get('layers_pattern')
  if wanted is None or wanted == []:
    return True
  wanted = [wanted] if isinstance(wanted, int) else wanted
  patterns = [patterns] if isinstance(patterns, str) and patterns else patterns or [r'[^.]*']
  for pattern in patterns:
    match = re.match(rf'(?:^|.*?\.){pattern}\.(\d+)\.', path)
    if match:
      return int(match[1]) in wanted
  return False


def check_targets(config: Mapping[str, Any], paths: Iterable[str], *, subject: str) -> None:
  """Every path is selected by target_modules; a module named there without tensors is warned of.

  Raises:
    ValueError: a path that the config does not select.
  """
  paths = list(paths)
  chosen = config['target_modules']
  for path in paths:
    if not targets(config, path):
      near = did_you_mean(path.rpartition('.')[2], () if isinstance(chosen, str) else chosen)
      by = ''.join(
        f' with {key} {config[key]!r}'
        for key in ('exclude_modules', 'layers_to_transform', 'modules_to_save')
        if config.get(key)
      )
      raise ValueError(
        f"{subject}: target_modules {chosen!r}{by} does not select '{path}', for which there are "
        f'tensors{near or "."}'
      )
  for suffix in () if isinstance(chosen, str) else chosen:
    if not any(path == suffix or path.endswith(f'.{suffix}') for path in paths):
      near = did_you_mean(suffix, {path.rpartition('.')[2] for path in paths})
      warnings.warn(
        f"{subject}: target_modules names '{suffix}', for which there are no tensors{near or '.'}",
        stacklevel=2,
      )


def _check_unknown(config: Mapping[str, Any], form: PeftForm, subject: str, strict: bool) -> None:
  known = {'peft_type', *COMMON, *_OPTIONAL, *_NEUTRAL, *form.names, *peft_types.besides()}
  unknown = [key for key in config if key not in known]
  if not unknown:
    return
  near = did_you_mean(unknown[0], known)
  message = f'{subject} has the unknown field {unknown[0]!r}{near or "."}'
  if strict:
    raise ValueError(message)
  if len(unknown) > 1:
    message += f' So are {", ".join(repr(key) for key in unknown[1:])}.'
  warnings.warn(f'{message} It is ignored.', stacklevel=2)


def _expect(config: Mapping[str, Any], key: str, good: bool, expected: str, subject: str) -> None:
  if not good:
    value = config[key]
    given = 'no ' + key if value is None else f'{key} = {value!r:.80}'
    raise ValueError(f'{subject} has {given}; expected {expected}.')


def _check_common(config: Mapping[str, Any], subject: str) -> None:
  base, chosen = config['base_model_name_or_path'], config['target_modules']
  good = base is None or isinstance(base, str)
  _expect(config, 'base_model_name_or_path', good, 'a name or null', subject)
  words = 'a list of names or a valid regex'
  _expect(config, 'target_modules', _is_regex(chosen) or _are_words(chosen), words, subject)
  excluded = config['exclude_modules']
  good = not excluded or _is_regex(excluded) or _are_words(excluded)
  _expect(config, 'exclude_modules', good, words, subject)
  numbers = config['layers_to_transform']
  good = numbers is None or _are_whole(numbers if isinstance(numbers, list) else [numbers])
  _expect(config, 'layers_to_transform', good, 'a whole number or a list of them', subject)
  pattern = config['layers_pattern']
  good = not pattern or _is_regex(pattern) or _are_words(pattern)
  _expect(config, 'layers_pattern', good, 'a name or a list of names', subject)


def _check_key(config: Mapping[str, Any], key: Key, kind: str, subject: str) -> None:
  good, words = _allowed(key, kind)
  _expect(config, key.name, good(config[key.name]), words, subject)
  if key.pattern:
    table = config[key.pattern]
    fits = isinstance(table, dict) and all(_is_regex(k) and good(v) for k, v in table.items())
    _expect(config, key.pattern, fits, f'an object {{regex of layers: {words}}}', subject)


def _allowed(key: Key, kind: str) -> tuple[Any, str]:
  """(whether a value fits, what fits in words)."""

  def ranged(value: Any) -> bool:
    return key.least <= value < key.below

  if key.read:
    read = key.read
    return lambda v: _reads(read, v), f'a value of {key.name} that PEFT has'
  least = f' of {key.least} or more' if key.least > -math.inf else ''
  if kind == 'int':
    return lambda v: type(v) is int and ranged(v), f'a whole number{least}'
  if kind == 'bool':
    return lambda v: isinstance(v, bool), 'true or false'
  words = 'a finite number'
  if key.below < math.inf:
    words = f'a number of {key.least:g} to below {key.below:g}'
  return lambda v: _is_number(v) and ranged(v), words


def _reads(read: Any, value: Any) -> bool:
  try:
    read(value)
  except (ValueError, TypeError):
    return False
  return True


def _check_meaning(config: Mapping[str, Any], form: PeftForm, subject: str) -> None:
  for key in peft_types.wrong(config, form) + [
    k for k, values in _PLAIN_ONLY.items() if config[k] not in values
  ]:
    plain = {**_PLAIN_ONLY, **form.fixed, **{k: (v,) for k, v in form.marks.items()}}
    expected = plain.get(key, (None,))[0]
    raise ValueError(
      f'{subject} has {key} = {config.get(key)!r:.60}, which peftlab does not read. Expected '
      f'{expected!r}.'
    )
  for key, values in form.starts.items():
    if key in config and config[key] not in values:
      raise ValueError(
        f'{subject} has {key} = {config[key]!r}: its factors belong to a base from which their '
        'start was taken. Expected an adapter for the unchanged base (PEFT converts it by '
        'save_pretrained(..., path_initial_model_for_weight_conversion=...)).'
      )
  for key in form.training:
    if config.get(key):
      warnings.warn(
        f'{subject} has {key} = {config[key]!r}, which peftlab does not do in training.',
        stacklevel=2,
      )


def _word(declared: Any) -> str:
  return declared if isinstance(declared, str) else getattr(declared, '__name__', '')


def _is_number(value: Any) -> bool:
  return type(value) in (int, float) and math.isfinite(value)


def _are_words(value: object) -> bool:
  return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, str) for v in value)


def _are_whole(values: Iterable[Any]) -> bool:
  return all(type(value) is int and value >= 0 for value in values)


def _is_regex(value: object) -> bool:
  if not isinstance(value, str) or not value:
    return False
  try:
    re.compile(value)
  except re.error:
    return False
  return True


def _by_pattern(table: Mapping[str, Any], path: str, default: Any) -> Any:
  """The value of the first pattern that matches `path` or a suffix of it that starts at a dot."""
  for pattern, value in table.items():
    if re.match(rf'(.*\.)?({pattern})$', path):
      return value
  return default

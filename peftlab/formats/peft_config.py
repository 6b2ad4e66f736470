"""adapter_config.json of an HF PEFT LoRA adapter: checked, completed, resolved per layer."""

from collections.abc import Iterable, Mapping
import math
import re
from typing import Any
import warnings

from peftlab._registry import did_you_mean

# The fields of PEFT 0.21.2's LoraConfig that a reader needs, with a plain adapter's values.
_DEFAULTS: dict[str, Any] = {
  'peft_type': 'LORA',
  'task_type': 'CAUSAL_LM',
  'base_model_name_or_path': None,
  'revision': None,
  'inference_mode': True,
  'r': None,
  'lora_alpha': None,
  'lora_dropout': 0.0,
  'target_modules': None,
  'exclude_modules': None,
  'layers_to_transform': None,
  'layers_pattern': None,
  'rank_pattern': {},
  'alpha_pattern': {},
  'use_rslora': False,
  'use_dora': False,
  'fan_in_fan_out': False,
  'bias': 'none',
  'modules_to_save': None,
  'init_lora_weights': True,
}
# Fields that say nothing about what the tensors mean.
_NEUTRAL = (
  'auto_mapping',
  'corda_config',
  'ensure_weight_tying',
  'eva_config',
  'loftq_config',
  'lora_ga_config',
  'megatron_config',
  'megatron_core',
  'peft_version',
  'qalora_group_size',
  'runtime_config',
)
# Fields that change the computation when set to anything but these; we read none of it.
_PLAIN_ONLY: dict[str, tuple[Any, ...]] = {
  'alora_invocation_tokens': (None, []),
  'arrow_config': (None,),
  'bias': ('none',),
  'kasa_config': (None,),
  'layer_replication': (None, []),
  'lora_bias': (False, None),
  'modules_to_save': (None, []),
  'monteclora_config': (None,),
  'target_parameters': (None, []),
  'trainable_token_indices': (None, [], {}),
  'use_bdlora': (None, False),
  'use_qalora': (False, None),
  'velora_config': (None,),
}
# Initialisations that leave the base as it is. The others (pissa, olora, corda, loftq, lora_ga)
# take the start out of the base: the factors then belong to a base that no longer exists.
_KEEPS_BASE = (True, False, None, 'gaussian', 'eva', 'orthogonal')
KNOWN_FIELDS = frozenset((*_DEFAULTS, *_NEUTRAL, *_PLAIN_ONLY))
_PEFT_TYPES = ('ADALORA', 'BOFT', 'HRA', 'IA3', 'LOHA', 'LOKR', 'LORA', 'OFT', 'PREFIX_TUNING')
_PEFT_TYPES += ('PROMPT_TUNING', 'P_TUNING', 'RANDLORA', 'VBLORA', 'VERA', 'XLORA')


def check_config(config: Mapping[str, Any], *, subject: str, strict: bool) -> dict[str, Any]:
  """`config` with PEFT's defaults filled in, every field that matters checked.

  Args:
    config: the fields; `r`, `lora_alpha` and `target_modules` are needed.
    subject: the start of every message, such as "PEFT config 'DIR/adapter_config.json'".
    strict: a field that PEFT 0.21.2 does not have is an error (our own writing); otherwise it is
      warned about (a file from a later version).

  Raises:
    ValueError: another peft_type, a missing or ill-typed field, a field whose meaning we lack.
  """
  _check_type(config.get('peft_type', 'LORA' if strict else None), subject)
  _check_unknown(config, subject, strict)
  full = _DEFAULTS | dict(config)
  full |= {key: {} for key in ('rank_pattern', 'alpha_pattern') if full[key] is None}
  _check_values(full, subject)
  for field, plain in _PLAIN_ONLY.items():
    if field in full and full[field] not in plain:
      raise ValueError(
        f'{subject} has {field} = {full[field]!r:.60}, which peftlab does not read. Expected '
        f'{plain[0]!r}.'
      )
  init = full['init_lora_weights']
  if init not in _KEEPS_BASE:
    raise ValueError(
      f'{subject} has init_lora_weights = {init!r}: its factors belong to a base from which their '
      'start was taken. Expected an adapter for the unchanged base (PEFT converts it by '
      'save_pretrained(..., path_initial_model_for_weight_conversion=...)).'
    )
  return full


def rank_of(config: Mapping[str, Any], path: str) -> int:
  """The rank of the layer at `path` ('model.layers.0.self_attn.q_proj')."""
  return _by_pattern(config['rank_pattern'], path, config['r'])


def scale_of(config: Mapping[str, Any], path: str) -> float:
  """What multiplies B A at `path`: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv:2312.03732)."""
  rank = rank_of(config, path)
  alpha = _by_pattern(config['alpha_pattern'], path, config['lora_alpha'])
  return alpha / (math.sqrt(rank) if config['use_rslora'] else rank)


def targets(config: Mapping[str, Any], path: str) -> bool:
  """Whether target_modules selects the layer at `path`: by suffix of whole words, or by regex."""
  chosen = config['target_modules']
  if isinstance(chosen, str):
    return chosen == 'all-linear' or re.fullmatch(chosen, path) is not None
  return any(path == suffix or path.endswith(f'.{suffix}') for suffix in chosen)


def check_targets(config: Mapping[str, Any], paths: Iterable[str], *, subject: str) -> None:
  """Every path is selected by target_modules; a module named there without tensors is warned of.

  Raises:
    ValueError: a path that target_modules does not select.
  """
  paths = list(paths)
  chosen = config['target_modules']
  for path in paths:
    if not targets(config, path):
      near = did_you_mean(path.rpartition('.')[2], () if isinstance(chosen, str) else chosen)
      raise ValueError(
        f"{subject}: target_modules {chosen!r} does not select '{path}', for which there are "
        f'tensors{near or "."}'
      )
  for suffix in () if isinstance(chosen, str) else chosen:
    if not any(path == suffix or path.endswith(f'.{suffix}') for path in paths):
      near = did_you_mean(suffix, {path.rpartition('.')[2] for path in paths})
      warnings.warn(
        f"{subject}: target_modules names '{suffix}', for which there are no tensors{near or '.'}",
        stacklevel=2,
      )


def _check_type(peft_type: object, subject: str) -> None:
  if peft_type != 'LORA':
    near = did_you_mean(str(peft_type), _PEFT_TYPES) if peft_type not in _PEFT_TYPES else ''
    raise ValueError(f"{subject} has peft_type {peft_type!r}{near or '.'} Expected 'LORA'.")


def _check_unknown(config: Mapping[str, Any], subject: str, strict: bool) -> None:
  unknown = [field for field in config if field not in KNOWN_FIELDS]
  if not unknown:
    return
  near = did_you_mean(unknown[0], KNOWN_FIELDS)
  message = f'{subject} has the unknown field {unknown[0]!r}{near or "."}'
  if strict:
    raise ValueError(message)
  if len(unknown) > 1:
    message += f' So are {", ".join(repr(field) for field in unknown[1:])}.'
  warnings.warn(f'{message} It is ignored.', stacklevel=2)


def _check_values(config: Mapping[str, Any], subject: str) -> None:
  def expect(field: str, good: bool, expected: str) -> None:
    if not good:
      value = config[field]
      given = 'no ' + field if value is None else f'{field} = {value!r:.80}'
      raise ValueError(f'{subject} has {given}; expected {expected}.')

  expect('r', _is_rank(config['r']), 'a whole number of 1 or more')
  expect('lora_alpha', _is_number(config['lora_alpha']), 'a finite number')
  dropout = config['lora_dropout']
  expect('lora_dropout', _is_number(dropout) and 0 <= dropout < 1, 'a number of 0 to below 1')
  expect('use_rslora', isinstance(config['use_rslora'], bool), 'true or false')
  expect('use_dora', isinstance(config['use_dora'], bool), 'true or false')
  base = config['base_model_name_or_path']
  expect('base_model_name_or_path', base is None or isinstance(base, str), 'a name or null')
  chosen = config['target_modules']
  expect(
    'target_modules', _is_regex(chosen) or _are_words(chosen), 'a list of names or a valid regex'
  )
  for field, good, what in (
    ('rank_pattern', _is_rank, 'rank'),
    ('alpha_pattern', _is_number, 'alpha'),
  ):
    table = config[field]
    expect(
      field,
      isinstance(table, dict) and all(_is_regex(k) and good(v) for k, v in table.items()),
      f'an object {{regex of layers: {what}}}',
    )


def _is_rank(value: object) -> bool:
  return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
  return type(value) in (int, float) and math.isfinite(value)


def _are_words(value: object) -> bool:
  return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, str) for v in value)


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

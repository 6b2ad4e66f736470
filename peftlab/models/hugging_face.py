"""What config.json has in common for every HF decoder: sizes, rope, types of layers."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import pathlib
from typing import Any

from peftlab import _registry
from peftlab.models.config import Rope
from peftlab.models.families import MOST_LAYERS, Fields

ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
}

# Tokens, dtypes, versions, how to generate: nothing that changes the logits.
HARMLESS = (
  r'_.*',
  r'.*_token_id',
  r'architectures',
  r'cache_implementation',
  r'dtype',
  r'initializer_range',
  r'is_llama_config',
  r'model_type',
  r'tokenizer_class',
  r'torch_dtype',
  r'transformers.*',
  r'use_cache',
)
# Of models with experts: for training alone.
HARMLESS_EXPERTS = (r'output_router_logits', r'router_aux_loss_coef', r'router_jitter_noise')
WINDOWED, FULL = 'sliding_attention', 'full_attention'


@dataclasses.dataclass(frozen=True)
class Described:
  """A config without a folder: of a named size."""

  directory: pathlib.Path
  config: Mapping[str, Any]


def fields_of(source: Any) -> Fields:
  """The fields of config.json of a folder, or of what stands for one."""
  return Fields(source.config, f"'{source.directory / 'config.json'}'")


def sizes(f: Fields, *, head_dim: int | None = None, tied: bool = False) -> dict[str, Any]:
  """The options of `DecoderConfig` that every HF decoder tells in the same fields.

  Args:
    f: the config.
    head_dim: where it is not told; None: embed / q_heads.
    tied: where tie_word_embeddings is not told.
  """
  embed, q_heads = f.count('hidden_size'), f.count('num_attention_heads')
  f.expect('attention_dropout', 0.0)
  return dict(
    vocab=f.count('vocab_size'),
    layers=f.count('num_hidden_layers', limit=MOST_LAYERS),
    embed=embed,
    mlp=f.count('intermediate_size'),
    q_heads=q_heads,
    kv_heads=f.count('num_key_value_heads', q_heads),
    head_dim=f.count('head_dim', head_dim or embed // q_heads),
    max_length=f.count('max_position_embeddings'),
    norm_eps=f.take('rms_norm_eps', float),
    tied=f.take('tie_word_embeddings', bool, tied),
  )


def layer_windows(f: Fields, window: int) -> tuple[int, ...] | None:
  """The windows that `layer_types` tells; None where it is absent.

  Raises:
    ValueError: a type that is not known.
  """
  words = {WINDOWED: window, FULL: 0}
  types = layer_types(f, words)
  return None if types is None else tuple(words[name] for name in types)


def layer_types(f: Fields, known: Any) -> list[str] | None:
  """The words of `layer_types`, each one of `known`; None where it is absent.

  Raises:
    ValueError: a type that is not known.
  """
  types = f.take('layer_types', list, None)
  for name in types or ():
    if name not in known:
      near = _registry.did_you_mean(str(name), known)
      raise ValueError(
        f'{f.subject} has the layer type {name!r}{near or "."} Supported: {", ".join(known)}.'
      )
  return types


def rope_of(f: Fields, *, theta: float, max_length: int) -> Rope:
  """The one rope of a config, in `rope_parameters` or in `rope_theta` and `rope_scaling`.

  Args:
    f: the config.
    theta: where it is not told.
    max_length: of the config; a yarn without a factor stretches to it.
  """
  theta = f.take('rope_theta', float, theta)
  given = f.take('rope_parameters', dict, {}) | f.take('rope_scaling', dict, {})
  return read_rope(given, f'{f.subject}, rope', theta=theta, max_length=max_length)


def read_rope(
  given: dict[str, Any], subject: str, *, theta: float, max_length: int | None = None
) -> Rope:
  """A Rope from `rope_scaling` or one set of `rope_parameters`.

  Args:
    given: {'rope_type': 'llama3', 'factor': 8.0, ...}; {} for none.
    subject: where it comes from, for messages.
    theta: where `given` has no rope_theta.
    max_length: of the config; a yarn without a factor stretches to it.

  Raises:
    ValueError: a type or a field that is not known, or one that is missing.
  """
  fields = Fields(given, subject)
  legacy = fields.take('type', str, 'default')
  words = ('linear', 'llama3', 'proportional', 'yarn')
  types = {'default': 'none', **{word: word for word in words}}
  scaling = fields.choose('rope_type', types, legacy)
  options: dict[str, Any] = {'theta': fields.take('rope_theta', float, theta), 'scaling': scaling}
  if scaling in ('linear', 'llama3'):
    options['factor'] = fields.take('factor', float)
  if scaling == 'llama3':
    options['low_freq_factor'] = fields.take('low_freq_factor', float)
    options['high_freq_factor'] = fields.take('high_freq_factor', float)
    options['original_length'] = fields.take('original_max_position_embeddings', int)
  if scaling == 'proportional':
    options['factor'] = fields.take('factor', float, 1.0)
    options['fraction'] = fields.take('partial_rotary_factor', float, 1.0)
  if scaling == 'yarn':
    options |= _yarn(fields, max_length)
  fields.expect('partial_rotary_factor', 1.0, options.get('fraction', 1.0))
  fields.finish()
  return Rope(**options)


def _yarn(fields: Fields, max_length: int | None) -> dict[str, Any]:
  original = fields.count('original_max_position_embeddings')
  stretched = None if max_length is None else max_length / original
  factor = fields.take('factor', float, *(() if stretched is None else (stretched,)))
  amplitude = fields.take('attention_factor', float, None)
  scale, all_scale = (fields.take(n, float, 0.0) for n in ('mscale', 'mscale_all_dim'))
  if amplitude is None and scale and all_scale:
    amplitude = yarn_scale(factor, scale) / yarn_scale(factor, all_scale)
  return dict(
    factor=factor,
    original_length=original,
    beta_fast=fields.take('beta_fast', float, 32.0),
    beta_slow=fields.take('beta_slow', float, 1.0),
    truncate=fields.take('truncate', bool, True),
    amplitude=yarn_scale(factor) if amplitude is None else amplitude,
  )


def yarn_scale(factor: float, scale: float = 1.0) -> float:
  """By how much yarn sharpens attention (https://arxiv.org/abs/2309.00071, eq. 22)."""
  return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

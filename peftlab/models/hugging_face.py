"""What config.json has in common for every HF decoder: rope, activations, harmless fields."""

from __future__ import annotations

from typing import Any

from peftlab.models.config import Rope
from peftlab.models.families import Fields

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


def read_rope(given: dict[str, Any], subject: str, *, theta: float) -> Rope:
  """A Rope from `rope_scaling` or one set of `rope_parameters`.

  Args:
    given: {'rope_type': 'llama3', 'factor': 8.0, ...}; {} for none.
    subject: where it comes from, for messages.
    theta: where `given` has no rope_theta.

  Raises:
    ValueError: a type or a field that is not known, or one that is missing.
  """
  fields = Fields(given, subject)
  legacy = fields.take('type', str, 'default')
  types = {'default': 'none', 'linear': 'linear', 'llama3': 'llama3'}
  scaling = fields.choose('rope_type', types, legacy)
  options: dict[str, Any] = {'theta': fields.take('rope_theta', float, theta), 'scaling': scaling}
  if scaling != 'none':
    options['factor'] = fields.take('factor', float)
  if scaling == 'llama3':
    options['low_freq_factor'] = fields.take('low_freq_factor', float)
    options['high_freq_factor'] = fields.take('high_freq_factor', float)
    options['original_length'] = fields.take('original_max_position_embeddings', int)
  fields.expect('partial_rotary_factor', 1.0)
  fields.finish()
  return Rope(**options)

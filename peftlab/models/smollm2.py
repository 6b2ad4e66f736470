"""The family smollm2: SmolLM2 (https://arxiv.org/abs/2502.02737), in the files a llama."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.models import llama
from peftlab.models.families import Family


def _size(
  hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, theta: float = 100_000.0
) -> dict[str, Any]:
  return {
    'vocab_size': 49_152,
    'hidden_size': hidden,
    'intermediate_size': mlp,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': kv_heads,
    'max_position_embeddings': 8192,
    'rms_norm_eps': 1e-5,
    'rope_theta': theta,
    'tie_word_embeddings': True,
  }


# Its config.json has model_type llama, so that folders are read by that family.
FAMILY = Family(
  formats=llama.FAMILY.formats,
  sizes={
    'smollm2-135m': _size(576, 1536, 30, 9, 3),
    'smollm2-360m': _size(960, 2560, 32, 15, 5),
    'smollm2-1.7b': _size(2048, 8192, 24, 32, 32, 130_000.0),
  },
)
_registry.families.register('smollm2')(FAMILY)

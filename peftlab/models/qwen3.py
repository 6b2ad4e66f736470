"""The family qwen3: the dense models of Qwen3 (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import hugging_face, llama
from peftlab.models.config import DecoderConfig
from peftlab.models.families import Family, Fields, Format, WeightMap

HF_MODULES = llama.HF_MODULES | {
  'layers.attn.q_norm': 'model.layers.{layer}.self_attn.q_norm',
  'layers.attn.k_norm': 'model.layers.{layer}.self_attn.k_norm',
}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type qwen3.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  options = attention_options(f)
  config = DecoderConfig(
    family='qwen3',
    activation=f.choose('hidden_act', hugging_face.ACTIVATIONS, 'silu'),
    windows=_windows(f, options['layers']),
    **options,
  )
  f.finish(hugging_face.HARMLESS)
  return config


def attention_options(f: Fields) -> dict[str, Any]:
  """What all of Qwen3's families have in common: sizes, rope, biases, norms of the heads."""
  sizes = hugging_face.sizes(f, head_dim=128)
  bias = f.take('attention_bias', bool, False)
  rope = hugging_face.rope_of(f, theta=10_000.0, max_length=sizes['max_length'])
  return dict(sizes, rope=rope, qk_norm=True, qkv_bias=bias, o_bias=bias)


def _windows(f: Fields, layers: int) -> tuple[int, ...]:
  first = f.take('max_window_layers', int, 28)
  used = f.take('use_sliding_window', bool, False)
  window = f.take('sliding_window', int, 4096)  # of no meaning where it is not used
  told = hugging_face.layer_windows(f, window if used else 0)
  if told is None and used:
    told = tuple(window if i >= first else 0 for i in range(layers))
  return told if told and any(told) else ()


def size(hidden: int, mlp: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
  """The config of a named size."""
  return {
    'vocab_size': 151_936,
    'hidden_size': hidden,
    'intermediate_size': mlp,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': 8,
    'head_dim': 128,
    'max_position_embeddings': 40_960,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1_000_000.0,
    **fields,
  }


FAMILY = Family(
  formats={'hf': Format(config=hf_config, weights=WeightMap(modules=HF_MODULES))},
  model_types=('qwen3',),
  sizes={
    'qwen3-0.6b': size(1024, 3072, 28, 16, tie_word_embeddings=True),
    'qwen3-1.7b': size(2048, 6144, 28, 16, tie_word_embeddings=True),
    'qwen3-4b': size(2560, 9728, 36, 32, tie_word_embeddings=True),
    'qwen3-8b': size(4096, 12288, 36, 32),
    'qwen3-14b': size(5120, 17408, 40, 40),
    'qwen3-32b': size(5120, 25600, 64, 64),
  },
)
_registry.families.register('qwen3')(FAMILY)

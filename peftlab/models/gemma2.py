"""The family gemma2: Gemma 2 (https://arxiv.org/abs/2408.00118)."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import hugging_face, llama
from peftlab.models.config import DecoderConfig
from peftlab.models.families import Family, Fields, Format, WeightMap

HF_MODULES = llama.HF_MODULES | {
  'layers.post_attn_norm': 'model.layers.{layer}.post_attention_layernorm',
  'layers.mlp_norm': 'model.layers.{layer}.pre_feedforward_layernorm',
  'layers.post_mlp_norm': 'model.layers.{layer}.post_feedforward_layernorm',
}
PATTERN = 2  # every second layer sees all tokens


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type gemma2.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  sizes = hugging_face.sizes(f, head_dim=256, tied=True)
  bias = f.take('attention_bias', bool, False)
  config = DecoderConfig(
    family='gemma2',
    **sizes,
    norm_unit_offset=True,
    embed_scale=sizes['embed'] ** 0.5,
    activation=f.choose('hidden_activation', hugging_face.ACTIVATIONS, 'gelu_pytorch_tanh'),
    rope=hugging_face.rope_of(f, theta=10_000.0, max_length=sizes['max_length']),
    windows=windows(f, sizes['layers'], f.count('sliding_window', 4096), PATTERN),
    attention_scale=f.take('query_pre_attn_scalar', float, 256.0) ** -0.5,
    attention_softcap=f.optional('attn_logit_softcapping', float, 50.0),
    logit_softcap=f.optional('final_logit_softcapping', float, 30.0),
    post_norms=True,
    qkv_bias=bias,
    o_bias=bias,
  )
  f.expect('use_bidirectional_attention', False)
  f.finish((*hugging_face.HARMLESS, 'hidden_act'))  # hidden_activation is what counts
  return config


def windows(f: Fields, layers: int, window: int, pattern: int) -> tuple[int, ...]:
  """Per layer: what `layer_types` says, else a window but for each `pattern`-th layer."""
  told = hugging_face.layer_windows(f, window)
  return pattern_windows(layers, window, pattern) if told is None else told


def pattern_windows(layers: int, window: int, pattern: int) -> tuple[int, ...]:
  """Windows where each `pattern`-th layer has none: (w, w, 0, w, ...) for 3."""
  return tuple(window if (i + 1) % pattern else 0 for i in range(layers))


def _size(**fields: Any) -> dict[str, Any]:
  return {
    'vocab_size': 256_000,
    'head_dim': 256,
    'max_position_embeddings': 8192,
    'rms_norm_eps': 1e-6,
    **fields,
  }


FAMILY = Family(
  formats={'hf': Format(config=hf_config, weights=WeightMap(modules=HF_MODULES))},
  model_types=('gemma2',),
  sizes={
    'gemma2-2b': _size(
      hidden_size=2304,
      intermediate_size=9216,
      num_hidden_layers=26,
      num_attention_heads=8,
      num_key_value_heads=4,
      query_pre_attn_scalar=256,
    ),
    'gemma2-9b': _size(
      hidden_size=3584,
      intermediate_size=14336,
      num_hidden_layers=42,
      num_attention_heads=16,
      num_key_value_heads=8,
      query_pre_attn_scalar=256,
    ),
  },
)
_registry.families.register('gemma2')(FAMILY)

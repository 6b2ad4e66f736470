"""The family mixtral: Mixtral of experts (https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import hugging_face, llama
from peftlab.models.config import DecoderConfig, Experts
from peftlab.models.families import Family, Format, WeightMap

HF_MODULES = {
  ours: theirs for ours, theirs in llama.HF_MODULES.items() if not ours.startswith('layers.mlp.')
} | {
  'layers.mlp.router.proj': 'model.layers.{layer}.block_sparse_moe.gate',
  'layers.mlp.experts.gate': 'model.layers.{layer}.block_sparse_moe.experts.{expert}.w1',
  'layers.mlp.experts.up': 'model.layers.{layer}.block_sparse_moe.experts.{expert}.w3',
  'layers.mlp.experts.down': 'model.layers.{layer}.block_sparse_moe.experts.{expert}.w2',
}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type mixtral.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  sizes = hugging_face.sizes(f)
  window = f.take('sliding_window', int, None)
  config = DecoderConfig(
    family='mixtral',
    **sizes,
    activation=f.choose('hidden_act', hugging_face.ACTIVATIONS, 'silu'),
    rope=hugging_face.rope_of(f, theta=1_000_000.0, max_length=sizes['max_length']),
    windows=() if window is None else (window,) * sizes['layers'],
    experts=Experts(
      count=f.count('num_local_experts', 8),
      chosen=f.count('num_experts_per_tok', 2),
      width=sizes['mlp'],
    ),
  )
  f.finish((*hugging_face.HARMLESS, *hugging_face.HARMLESS_EXPERTS))
  return config


def _size(hidden: int, mlp: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
  return {
    'hidden_size': hidden,
    'intermediate_size': mlp,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': 8,
    'num_local_experts': 8,
    'num_experts_per_tok': 2,
    'rms_norm_eps': 1e-5,
    'rope_theta': 1_000_000.0,
    **fields,
  }


FAMILY = Family(
  formats={'hf': Format(config=hf_config, weights=WeightMap(modules=HF_MODULES))},
  model_types=('mixtral',),
  sizes={
    'mixtral-8x7b': _size(4096, 14336, 32, 32, vocab_size=32_000, max_position_embeddings=32_768),
    'mixtral-8x22b': _size(6144, 16384, 56, 48, vocab_size=32_000, max_position_embeddings=65_536),
  },
)
_registry.families.register('mixtral')(FAMILY)

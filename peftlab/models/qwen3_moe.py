"""The family qwen3_moe: Qwen3 with experts (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import hugging_face, qwen3
from peftlab.models.config import DecoderConfig, Experts
from peftlab.models.families import Family, Fields, Format, WeightMap

HF_MODULES = qwen3.HF_MODULES | {
  'layers.mlp.router.proj': 'model.layers.{layer}.mlp.gate',
  'layers.mlp.experts.gate': 'model.layers.{layer}.mlp.experts.{expert}.gate_proj',
  'layers.mlp.experts.up': 'model.layers.{layer}.mlp.experts.{expert}.up_proj',
  'layers.mlp.experts.down': 'model.layers.{layer}.mlp.experts.{expert}.down_proj',
}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type qwen3_moe.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  options = qwen3.attention_options(f)
  used = f.take('use_sliding_window', bool, False)
  window = f.take('sliding_window', int, 4096)
  config = DecoderConfig(
    family='qwen3_moe',
    activation=f.choose('hidden_act', hugging_face.ACTIVATIONS, 'silu'),
    windows=(window,) * options['layers'] if used else (),  # in every layer, unlike qwen3
    experts=Experts(**expert_options(f)),
    sparse=sparse_layers(f, options['layers']),
    **options,
  )
  f.finish((*hugging_face.HARMLESS, *hugging_face.HARMLESS_EXPERTS, 'max_window_layers'))
  return config


def expert_options(f: Fields) -> dict[str, Any]:
  """The options of `Experts` that Qwen's configs tell."""
  return dict(
    count=f.count('num_experts'),
    chosen=f.count('num_experts_per_tok'),
    width=f.count('moe_intermediate_size'),
    normalize=f.take('norm_topk_prob', bool, False),
  )


def sparse_layers(f: Fields, layers: int) -> tuple[bool, ...]:
  """Per layer, whether it has experts."""
  step, dense = f.count('decoder_sparse_step', 1), f.take('mlp_only_layers', list, [])
  return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


FAMILY = Family(
  formats={'hf': Format(config=hf_config, weights=WeightMap(modules=HF_MODULES))},
  model_types=('qwen3_moe',),
  sizes={
    'qwen3_moe-30b-a3b': qwen3.size(
      2048,
      6144,
      48,
      32,
      num_key_value_heads=4,
      moe_intermediate_size=768,
      num_experts=128,
      num_experts_per_tok=8,
      norm_topk_prob=True,
    )
  },
)
_registry.families.register('qwen3_moe')(FAMILY)

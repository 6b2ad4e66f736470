"""The family qwen3_next: gated delta nets and attention, experts (Qwen3-Next)."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import hugging_face, qwen3, qwen3_moe
from peftlab.models.config import DecoderConfig, Delta, Experts
from peftlab.models.families import Family, Fields, Format, WeightMap

_LAYER = 'model.layers.{layer}'
HF_MODULES = qwen3_moe.HF_MODULES | {
  'layers.delta.qkvz': f'{_LAYER}.linear_attn.in_proj_qkvz',
  'layers.delta.ba': f'{_LAYER}.linear_attn.in_proj_ba',
  'layers.delta.norm': f'{_LAYER}.linear_attn.norm',
  'layers.delta.out': f'{_LAYER}.linear_attn.out_proj',
  'layers.mlp.shared.gate': f'{_LAYER}.mlp.shared_expert.gate_proj',
  'layers.mlp.shared.up': f'{_LAYER}.mlp.shared_expert.up_proj',
  'layers.mlp.shared.down': f'{_LAYER}.mlp.shared_expert.down_proj',
  'layers.mlp.shared_gate': f'{_LAYER}.mlp.shared_expert_gate',
}
HF_ARRAYS = {
  'layers.delta.conv': f'{_LAYER}.linear_attn.conv1d.weight',
  'layers.delta.a_log': f'{_LAYER}.linear_attn.A_log',
  'layers.delta.dt_bias': f'{_LAYER}.linear_attn.dt_bias',
}
_MIXERS = {'linear_attention': 'delta', 'full_attention': 'attention'}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type qwen3_next.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  sizes = hugging_face.sizes(f, head_dim=256)
  bias = f.take('attention_bias', bool, False)
  rotated = f.take('partial_rotary_factor', float, 0.25)
  shared = f.count('shared_expert_intermediate_size', 512)
  config = DecoderConfig(
    family='qwen3_next',
    **sizes,
    norm_unit_offset=True,
    activation=f.choose('hidden_act', hugging_face.ACTIVATIONS, 'silu'),
    rope=hugging_face.rope_of(f, theta=10_000.0, max_length=sizes['max_length']),
    rope_dims=int(sizes['head_dim'] * rotated),
    mixers=_mixers(f, sizes['layers']),
    delta=_delta(f),
    output_gate=True,
    qk_norm=True,
    qkv_bias=bias,
    o_bias=bias,
    experts=Experts(**qwen3_moe.expert_options(f), shared=shared, shared_gate=True),
    sparse=qwen3_moe.sparse_layers(f, sizes['layers']),
  )
  f.finish((*hugging_face.HARMLESS, *hugging_face.HARMLESS_EXPERTS))
  return config


def _mixers(f: Fields, layers: int) -> tuple[str, ...]:
  interval = f.count('full_attention_interval', 4)
  told = hugging_face.layer_types(f, _MIXERS)
  if told is None:
    return tuple('delta' if (i + 1) % interval else 'attention' for i in range(layers))
  return tuple(_MIXERS[name] for name in told)


def _delta(f: Fields) -> Delta:
  return Delta(
    key_heads=f.count('linear_num_key_heads', 16),
    value_heads=f.count('linear_num_value_heads', 32),
    key_dim=f.count('linear_key_head_dim', 128),
    value_dim=f.count('linear_value_head_dim', 128),
    window=f.count('linear_conv_kernel_dim', 4),
  )


def _size() -> dict[str, Any]:
  return qwen3.size(
    2048,
    5120,
    48,
    16,
    head_dim=256,
    num_key_value_heads=2,
    max_position_embeddings=262_144,
    rope_theta=10_000_000,
    moe_intermediate_size=512,
    num_experts=512,
    num_experts_per_tok=10,
    norm_topk_prob=True,
  )


FAMILY = Family(
  formats={
    'hf': Format(
      config=hf_config,
      # `mtp` predicts several tokens ahead.
      weights=WeightMap(modules=HF_MODULES, arrays=HF_ARRAYS, ignored=(r'mtp\..*',)),
    )
  },
  model_types=('qwen3_next',),
  sizes={'qwen3_next-80b-a3b': _size()},
)
_registry.families.register('qwen3_next')(FAMILY)

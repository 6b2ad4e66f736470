"""The family deepseek_v3: DeepSeek-V3 (https://arxiv.org/abs/2412.19437)."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_views import Fp8View
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import hugging_face, llama
from peftlab.models.config import DecoderConfig, Experts, Latent
from peftlab.models.families import Family, Fields, Format, WeightMap

_LAYER = 'model.layers.{layer}'
HF_MODULES = {
  ours: theirs
  for ours, theirs in llama.HF_MODULES.items()
  if ours not in ('layers.attn.k', 'layers.attn.v')
} | {
  'layers.attn.q_down': f'{_LAYER}.self_attn.q_a_proj',
  'layers.attn.q_norm': f'{_LAYER}.self_attn.q_a_layernorm',
  'layers.attn.q_up': f'{_LAYER}.self_attn.q_b_proj',
  'layers.attn.kv_down': f'{_LAYER}.self_attn.kv_a_proj_with_mqa',
  'layers.attn.kv_norm': f'{_LAYER}.self_attn.kv_a_layernorm',
  'layers.attn.kv_up': f'{_LAYER}.self_attn.kv_b_proj',
  'layers.mlp.router.proj': f'{_LAYER}.mlp.gate',
  'layers.mlp.experts.gate': f'{_LAYER}.mlp.experts.{{expert}}.gate_proj',
  'layers.mlp.experts.up': f'{_LAYER}.mlp.experts.{{expert}}.up_proj',
  'layers.mlp.experts.down': f'{_LAYER}.mlp.experts.{{expert}}.down_proj',
  'layers.mlp.shared.gate': f'{_LAYER}.mlp.shared_experts.gate_proj',
  'layers.mlp.shared.up': f'{_LAYER}.mlp.shared_experts.up_proj',
  'layers.mlp.shared.down': f'{_LAYER}.mlp.shared_experts.down_proj',
}
HF_ARRAYS = {'layers.mlp.router.correction': f'{_LAYER}.mlp.gate.e_score_correction_bias'}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type deepseek_v3.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  latent = _latent(f)
  head_dim = latent.nope_dim + latent.rope_dim
  # Not the size of a head: transformers writes that of the rotated part.
  sizes = hugging_face.sizes(f, head_dim=head_dim) | {'head_dim': head_dim}
  sizes['kv_heads'] = sizes['q_heads']
  bias = f.take('attention_bias', bool, False)
  rope = hugging_face.rope_of(f, theta=10_000.0, max_length=sizes['max_length'])
  first = f.take('first_k_dense_replace', int, 3)
  config = DecoderConfig(
    family='deepseek_v3',
    **sizes,
    activation=f.choose('hidden_act', hugging_face.ACTIVATIONS, 'silu'),
    rope=rope,
    rope_layout='interleaved' if f.take('rope_interleave', bool, True) else 'half',
    latent=latent,
    attention_scale=_scale(f, head_dim),
    qkv_bias=bias,
    o_bias=bias,
    experts=_experts(f),
    sparse=tuple(i >= first for i in range(sizes['layers'])),
  )
  f.expect('moe_layer_freq', 1)
  f.expect('scoring_func', 'sigmoid')
  f.expect('topk_method', 'noaux_tc')
  f.finish((*hugging_face.HARMLESS, 'ep_size', 'num_nextn_predict_layers'))
  return config


def _latent(f: Fields) -> Latent:
  return Latent(
    q_rank=f.optional('q_lora_rank', int, 1536),
    kv_rank=f.count('kv_lora_rank', 512),
    nope_dim=f.count('qk_nope_head_dim', 128),
    rope_dim=f.count('qk_rope_head_dim', 64),
    value_dim=f.count('v_head_dim', 128),
  )


def _scale(f: Fields, head_dim: int) -> float:
  """Of the scores: yarn sharpens them here too, by `mscale_all_dim`."""
  given = f.take('rope_parameters', dict, {}) | f.take('rope_scaling', dict, {})
  all_scale = given.get('mscale_all_dim') or 0.0
  if given.get('rope_type', given.get('type', 'default')) == 'default' or not all_scale:
    return head_dim**-0.5
  return head_dim**-0.5 * hugging_face.yarn_scale(given['factor'], all_scale) ** 2


def _experts(f: Fields) -> Experts:
  width = f.count('moe_intermediate_size', 2048)
  return Experts(
    count=f.count('n_routed_experts', 256),
    chosen=f.count('num_experts_per_tok', 8),
    width=width,
    scoring='sigmoid',
    normalize=f.take('norm_topk_prob', bool, True),
    scale=f.take('routed_scaling_factor', float, 2.5),
    groups=f.count('n_group', 8),
    chosen_groups=f.count('topk_group', 4),
    correction=True,
    shared=width * f.count('n_shared_experts', 1),
  )


def _size() -> dict[str, Any]:
  return {
    'vocab_size': 129_280,
    'hidden_size': 7168,
    'intermediate_size': 18_432,
    'num_hidden_layers': 61,
    'num_attention_heads': 128,
    'max_position_embeddings': 163_840,
    'rms_norm_eps': 1e-6,
    'rope_scaling': {
      'type': 'yarn',
      'factor': 40,
      'mscale': 1.0,
      'mscale_all_dim': 1.0,
      'original_max_position_embeddings': 4096,
    },
  }


FAMILY = Family(
  formats={
    'hf': Format(
      config=hf_config,
      weights=WeightMap(modules=HF_MODULES, arrays=HF_ARRAYS),
      view=Fp8View,  # which leaves out layer 61, that predicts several tokens ahead
    )
  },
  model_types=('deepseek_v3',),
  sizes={'deepseek_v3': _size()},
)
_registry.families.register('deepseek_v3')(FAMILY)

"""The family gpt_oss: gpt-oss (https://arxiv.org/abs/2508.10925)."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_views import Mxfp4View
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import gemma2, hugging_face, llama
from peftlab.models.config import DecoderConfig, Experts
from peftlab.models.families import Family, Format, WeightMap

PATTERN = 2  # every second layer sees all tokens
_LAYER = 'model.layers.{layer}'
HF_MODULES = {
  ours: theirs for ours, theirs in llama.HF_MODULES.items() if not ours.startswith('layers.mlp.')
} | {
  'layers.mlp.router.proj': f'{_LAYER}.mlp.router',
  'layers.mlp.experts.gate_up': f'{_LAYER}.mlp.experts.gate_up_proj',
  'layers.mlp.experts.down': f'{_LAYER}.mlp.experts.down_proj',
}
HF_ARRAYS = {
  'layers.attn.sinks': f'{_LAYER}.self_attn.sinks',
  'layers.mlp.experts.gate_up.kernel': f'{_LAYER}.mlp.experts.gate_up_proj',
  'layers.mlp.experts.gate_up.bias': f'{_LAYER}.mlp.experts.gate_up_proj_bias',
  'layers.mlp.experts.down.kernel': f'{_LAYER}.mlp.experts.down_proj',
  'layers.mlp.experts.down.bias': f'{_LAYER}.mlp.experts.down_proj_bias',
}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type gpt_oss.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  sizes = hugging_face.sizes(f, head_dim=64)
  bias = f.take('attention_bias', bool, True)
  f.expect('hidden_act', 'silu')  # the activation is the clamped one whatever it says
  config = DecoderConfig(
    family='gpt_oss',
    **sizes,
    rope=hugging_face.rope_of(f, theta=150_000.0, max_length=sizes['max_length']),
    windows=gemma2.windows(f, sizes['layers'], f.count('sliding_window', 128), PATTERN),
    sinks=True,
    qkv_bias=bias,
    o_bias=bias,
    experts=Experts(
      count=f.count('num_local_experts', 128),
      chosen=f.count('num_experts_per_tok', 4),
      width=sizes['mlp'],
      scoring='chosen',
      router_bias=True,
      bias=True,
      layout='interleaved',
      limit=f.take('swiglu_limit', float, 7.0),
    ),
  )
  more = ('experts_per_token', 'initial_context_length')
  f.finish((*hugging_face.HARMLESS, *hugging_face.HARMLESS_EXPERTS, *more))
  return config


def _size(layers: int, experts: int) -> dict[str, Any]:
  return {
    'vocab_size': 201_088,
    'hidden_size': 2880,
    'intermediate_size': 2880,
    'num_hidden_layers': layers,
    'num_attention_heads': 64,
    'num_key_value_heads': 8,
    'num_local_experts': experts,
    'num_experts_per_tok': 4,
    'max_position_embeddings': 131_072,
    'rms_norm_eps': 1e-5,
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 32.0,
      'truncate': False,
      'original_max_position_embeddings': 4096,
    },
  }


FAMILY = Family(
  formats={
    'hf': Format(
      config=hf_config,
      weights=WeightMap(
        modules=HF_MODULES,
        arrays=HF_ARRAYS,
        in_first=('layers.mlp.experts.gate_up', 'layers.mlp.experts.down'),
      ),
      view=Mxfp4View,
    )
  },
  model_types=('gpt_oss',),
  sizes={'gpt_oss-20b': _size(24, 32), 'gpt_oss-120b': _size(36, 128)},
)
_registry.families.register('gpt_oss')(FAMILY)

"""The family llama: Llama 2 and 3, SmolLM2, and whatever else has their config and weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from peftlab import _registry
from peftlab.formats.gguf import GGUFFile, undo_rope_permutation
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import hugging_face
from peftlab.models.config import DecoderConfig, Rope
from peftlab.models.families import MOST_LAYERS, Family, Fields, Format, WeightMap

HF_MODULES = {
  'embed': 'model.embed_tokens',
  'layers.attn_norm': 'model.layers.{layer}.input_layernorm',
  'layers.attn.q': 'model.layers.{layer}.self_attn.q_proj',
  'layers.attn.k': 'model.layers.{layer}.self_attn.k_proj',
  'layers.attn.v': 'model.layers.{layer}.self_attn.v_proj',
  'layers.attn.o': 'model.layers.{layer}.self_attn.o_proj',
  'layers.mlp_norm': 'model.layers.{layer}.post_attention_layernorm',
  'layers.mlp.gate': 'model.layers.{layer}.mlp.gate_proj',
  'layers.mlp.up': 'model.layers.{layer}.mlp.up_proj',
  'layers.mlp.down': 'model.layers.{layer}.mlp.down_proj',
  'norm': 'model.norm',
  'head': 'lm_head',
}
GGUF_MODULES = {
  'embed': 'token_embd',
  'layers.attn_norm': 'blk.{layer}.attn_norm',
  'layers.attn.q': 'blk.{layer}.attn_q',
  'layers.attn.k': 'blk.{layer}.attn_k',
  'layers.attn.v': 'blk.{layer}.attn_v',
  'layers.attn.o': 'blk.{layer}.attn_output',
  'layers.mlp_norm': 'blk.{layer}.ffn_norm',
  'layers.mlp.gate': 'blk.{layer}.ffn_gate',
  'layers.mlp.up': 'blk.{layer}.ffn_up',
  'layers.mlp.down': 'blk.{layer}.ffn_down',
  'norm': 'output_norm',
  'head': 'output',
}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type llama.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  sizes = hugging_face.sizes(f)
  attention_bias, mlp_bias = f.take('attention_bias', bool, False), f.take('mlp_bias', bool, False)
  config = DecoderConfig(
    family='llama',
    **sizes,
    activation=f.choose('hidden_act', hugging_face.ACTIVATIONS, 'silu'),
    rope=hugging_face.rope_of(f, theta=10_000.0, max_length=sizes['max_length']),
    qkv_bias=attention_bias,
    o_bias=attention_bias,
    mlp_bias=mlp_bias,
  )
  f.expect('pretraining_tp', 1)
  f.finish(hugging_face.HARMLESS)
  return config


def gguf_config(source: GGUFFile) -> DecoderConfig:
  """The config of a GGUF file with architecture llama.

  Raises:
    ValueError: a key that is missing, unknown, or of a value that is not supported.
  """
  f = gguf_fields(source, 'llama')
  embed, q_heads = f.count('embedding_length'), f.count('attention.head_count')
  head_dim = f.count('attention.key_length', embed // q_heads)
  f.expect('attention.value_length', head_dim)
  f.expect('rope.dimension_count', head_dim)
  f.expect('expert_count', 0)
  f.expect('expert_used_count', 0)
  config = DecoderConfig(
    family='llama',
    vocab=source.info('token_embd.weight').shape[0],
    layers=f.count('block_count', limit=MOST_LAYERS),
    embed=embed,
    mlp=f.count('feed_forward_length'),
    q_heads=q_heads,
    kv_heads=f.count('attention.head_count_kv', q_heads),
    head_dim=head_dim,
    max_length=f.count('context_length'),
    norm_eps=f.take('attention.layer_norm_rms_epsilon', float),
    tied='output.weight' not in source,
    rope=gguf_rope(f, source),
    qkv_bias='blk.0.attn_q.bias' in source,
    o_bias='blk.0.attn_output.bias' in source,
    mlp_bias='blk.0.ffn_gate.bias' in source,
  )
  f.finish(('vocab_size',))
  return config


def gguf_fields(source: GGUFFile, architecture: str) -> Fields:
  """The keys of one architecture in a GGUF file, without its name in front."""
  start = f'{architecture}.'
  values = {k.removeprefix(start): v for k, v in source.metadata.items() if k.startswith(start)}
  return Fields(values, f"'{source.path}' ({architecture})")


def gguf_rope(fields: Fields, source: GGUFFile) -> Rope:
  """The rotary embedding of a GGUF file: plain, linear, or with one factor per frequency."""
  theta = fields.take('rope.freq_base', float, 10_000.0)
  types = {'none': 'none', 'linear': 'linear'}
  scaling = fields.choose('rope.scaling.type', types, 'none')
  factor = fields.take('rope.scaling.factor', float, 1.0)
  if 'rope_freqs.weight' in source:
    if scaling != 'none':
      raise ValueError(f'{fields.subject} has both rope_freqs.weight and {scaling} rope scaling.')
    factors = tuple(float(x) for x in source['rope_freqs.weight'])
    return Rope(theta=theta, scaling='factors', factors=factors)
  return Rope(theta=theta, scaling=scaling, factor=factor)


def _unpermute(path: str, array: np.ndarray, config: DecoderConfig) -> np.ndarray:
  heads = {'layers.attn.q': config.q_heads, 'layers.attn.k': config.kv_heads}
  module = path.rpartition('.')[0]
  if module not in heads:
    return array
  return undo_rope_permutation(array, n_heads=heads[module])


def _llama3(hidden: int, mlp: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
  return {
    'vocab_size': 128_256,
    'hidden_size': hidden,
    'intermediate_size': mlp,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': 8,
    'max_position_embeddings': 131_072,
    'rms_norm_eps': 1e-5,
    'rope_theta': 500_000.0,
    'rope_scaling': {
      'rope_type': 'llama3',
      'factor': 32.0 if fields else 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 8192,
    },
    **fields,
  }


FAMILY = Family(
  formats={
    'hf': Format(
      config=hf_config,
      weights=WeightMap(
        modules=HF_MODULES, ignored=(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq',)
      ),
    ),
    'gguf': Format(
      config=gguf_config,
      weights=WeightMap(modules=GGUF_MODULES, change=_unpermute, ignored=(r'rope_freqs\.weight',)),
    ),
  },
  model_types=('llama',),
  architectures=('llama',),
  sizes={
    # Llama 3.2 (1B, 3B) and 3.1.
    'llama3-1b': _llama3(2048, 8192, 16, 32, tie_word_embeddings=True),
    'llama3-3b': _llama3(3072, 8192, 28, 24, tie_word_embeddings=True),
    'llama3-8b': _llama3(4096, 14_336, 32, 32),
    'llama3-70b': _llama3(8192, 28_672, 80, 64),
    'llama3-405b': _llama3(16_384, 53_248, 126, 128),
  },
)
_registry.families.register('llama')(FAMILY)

"""The family gemma3: the text models of Gemma 3 (https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

from typing import Any

import numpy as np

from peftlab import _registry
from peftlab.formats.gguf import GGUFFile
from peftlab.formats.hf_views import PlainView, TextView
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import gemma2, hugging_face, llama
from peftlab.models.config import DecoderConfig, Rope
from peftlab.models.families import MOST_LAYERS, Family, Fields, Format, WeightMap

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PATTERN = 6  # every sixth layer sees all tokens
_27B_LAYERS = 62

HF_MODULES = gemma2.HF_MODULES | {
  'layers.attn.q_norm': 'model.layers.{layer}.self_attn.q_norm',
  'layers.attn.k_norm': 'model.layers.{layer}.self_attn.k_norm',
}
# The text model in the files of one that sees images (4B and larger).
WRAPPED = {'language_model.model.': 'model.', 'language_model.lm_head.': 'lm_head.'}
GGUF_MODULES = llama.GGUF_MODULES | {
  'layers.attn.q_norm': 'blk.{layer}.attn_q_norm',
  'layers.attn.k_norm': 'blk.{layer}.attn_k_norm',
  'layers.post_attn_norm': 'blk.{layer}.post_attention_norm',
  'layers.post_mlp_norm': 'blk.{layer}.post_ffw_norm',
}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type gemma3_text.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  embed, bias = f.count('hidden_size'), f.take('attention_bias', bool, False)
  rope, local_rope = _hf_ropes(f)
  layers = f.count('num_hidden_layers', limit=MOST_LAYERS)
  config = DecoderConfig(
    vocab=f.count('vocab_size', 262_208),
    layers=layers,
    embed=embed,
    mlp=f.count('intermediate_size'),
    q_heads=f.count('num_attention_heads', 8),
    kv_heads=f.count('num_key_value_heads', 4),
    head_dim=f.count('head_dim', 256),
    max_length=f.count('max_position_embeddings', 131_072),
    norm_eps=f.take('rms_norm_eps', float, 1e-6),
    activation=f.choose('hidden_activation', hugging_face.ACTIVATIONS, 'gelu_pytorch_tanh'),
    tied=f.take('tie_word_embeddings', bool, True),
    rope=rope,
    local_rope=local_rope,
    windows=_hf_windows(f, layers),
    attention_scale=f.take('query_pre_attn_scalar', float, 256.0) ** -0.5,
    attention_softcap=f.take('attn_logit_softcapping', float, None),
    logit_softcap=f.take('final_logit_softcapping', float, None),
    qkv_bias=bias,
    o_bias=bias,
    **_always(embed),
  )
  f.expect('attention_dropout', 0.0)
  f.expect('use_bidirectional_attention', False)
  f.finish(hugging_face.HARMLESS)
  return config


def _always(embed: int) -> dict[str, Any]:
  """What every Gemma 3 has."""
  return dict(
    family='gemma3',
    norm_unit_offset=True,
    embed_scale=embed**0.5,
    qk_norm=True,
    post_norms=True,
  )


def _hf_windows(f: Fields, layers: int) -> tuple[int, ...]:
  pattern = f.count('sliding_window_pattern', f.count('_sliding_window_pattern', PATTERN))
  return gemma2.windows(f, layers, f.count('sliding_window', 4096), pattern)


def _hf_ropes(f: Fields) -> tuple[Rope, Rope]:
  """The rotary embeddings of global and local layers; scaling is the global one's alone."""
  theta = f.take('rope_theta', float, GLOBAL_THETA)
  local_theta = f.take('rope_local_base_freq', float, LOCAL_THETA)
  scaling = f.take('rope_scaling', dict, {})
  both = Fields(f.take('rope_parameters', dict, {}), f'{f.subject}, rope_parameters')
  full, local = both.take('full_attention', dict, {}), both.take('sliding_attention', dict, {})
  both.finish()
  where = f'{f.subject}, rope'
  return (
    hugging_face.read_rope(full | scaling, where, theta=theta),
    hugging_face.read_rope(local, where, theta=local_theta),
  )


def gguf_config(source: GGUFFile) -> DecoderConfig:
  """The config of a GGUF file with architecture gemma3.

  Raises:
    ValueError: a key that is missing, unknown, or of a value that is not supported.
  """
  f = llama.gguf_fields(source, 'gemma3')
  embed, q_heads = f.count('embedding_length'), f.count('attention.head_count')
  layers, head_dim = f.count('block_count', limit=MOST_LAYERS), f.count('attention.key_length', 256)
  f.expect('attention.value_length', head_dim)
  f.expect('rope.dimension_count', head_dim)
  window = f.count('attention.sliding_window')
  pattern = f.count('attention.sliding_window_pattern', PATTERN)
  # The scale is not in the file. Of the released models only the 27B does not use its head_dim.
  query_scalar = embed // q_heads if layers == _27B_LAYERS else head_dim
  config = DecoderConfig(
    vocab=source.info('token_embd.weight').shape[0],
    layers=layers,
    embed=embed,
    mlp=f.count('feed_forward_length'),
    q_heads=q_heads,
    kv_heads=f.count('attention.head_count_kv'),
    head_dim=head_dim,
    max_length=f.count('context_length'),
    norm_eps=f.take('attention.layer_norm_rms_epsilon', float),
    activation='gelu_tanh',
    tied='output.weight' not in source,
    rope=llama.gguf_rope(f, source),
    local_rope=Rope(theta=f.take('rope.freq_base_swa', float, LOCAL_THETA)),
    windows=gemma2.pattern_windows(layers, window, pattern),
    attention_scale=query_scalar**-0.5,
    attention_softcap=f.take('attn_logit_softcapping', float, None),
    logit_softcap=f.take('final_logit_softcapping', float, None),
    **_always(embed),
  )
  f.finish(('vocab_size',))
  return config


def _without_one(path: str, array: np.ndarray, config: DecoderConfig) -> np.ndarray:
  """Norms in a GGUF file hold 1 + w."""
  del config
  return array - 1.0 if path.endswith('.scale') else array


def _view(source: HfWeights) -> PlainView:
  wrapped = source.config.get('model_type') == 'gemma3'
  return TextView(source, WRAPPED) if wrapped else PlainView(source)


def _size(hidden: int, mlp: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
  return {
    'vocab_size': 262_144,
    'hidden_size': hidden,
    'intermediate_size': mlp,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': 1,
    'max_position_embeddings': 32_768,
    'sliding_window': 512,
    **fields,
  }


FAMILY = Family(
  formats={
    'hf': Format(config=hf_config, weights=WeightMap(modules=HF_MODULES), view=_view),
    'gguf': Format(
      config=gguf_config, weights=WeightMap(modules=GGUF_MODULES, change=_without_one)
    ),
  },
  model_types=('gemma3_text', 'gemma3'),
  architectures=('gemma3',),
  sizes={
    'gemma3-270m': _size(640, 2048, 18, 4),
    'gemma3-1b': _size(1152, 6912, 26, 4),
    'gemma3-4b': _size(
      2560,
      10_240,
      34,
      8,
      vocab_size=262_208,
      num_key_value_heads=4,
      max_position_embeddings=131_072,
      sliding_window=1024,
      rope_scaling={'rope_type': 'linear', 'factor': 8.0},
    ),
  },
)
_registry.families.register('gemma3')(FAMILY)

"""The family gemma4: the text models of Gemma 4, dense, with experts, with token embeddings."""

from __future__ import annotations

from typing import Any

from peftlab import _registry
from peftlab.formats.hf_views import PlainView, TextView
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import gemma2, gemma3, hugging_face
from peftlab.models.config import DecoderConfig, Experts, Rope
from peftlab.models.families import Family, Fields, Format, WeightMap

PATTERN = 6  # every sixth layer sees all tokens
GLOBAL_THETA, LOCAL_THETA, FRACTION = 1_000_000.0, 10_000.0, 0.25
# The text model in the files of one that sees images or hears.
WRAPPED = {'model.language_model.': 'model.', 'lm_head.': 'lm_head.'}

_LAYER = 'model.layers.{layer}'
HF_MODULES = gemma3.HF_MODULES | {
  'layers.mlp.dense_norm': f'{_LAYER}.pre_feedforward_layernorm',
  'layers.mlp.post_dense_norm': f'{_LAYER}.post_feedforward_layernorm_1',
  'layers.mlp.experts_norm': f'{_LAYER}.pre_feedforward_layernorm_2',
  'layers.mlp.post_experts_norm': f'{_LAYER}.post_feedforward_layernorm_2',
  'layers.mlp.dense.gate': f'{_LAYER}.mlp.gate_proj',
  'layers.mlp.dense.up': f'{_LAYER}.mlp.up_proj',
  'layers.mlp.dense.down': f'{_LAYER}.mlp.down_proj',
  'layers.mlp.sparse.router.proj': f'{_LAYER}.router.proj',
  'layers.mlp.sparse.experts.gate_up': f'{_LAYER}.experts.gate_up_proj',
  'layers.mlp.sparse.experts.down': f'{_LAYER}.experts.down_proj',
  'layers.token_embed.gate': f'{_LAYER}.per_layer_input_gate',
  'layers.token_embed.project': f'{_LAYER}.per_layer_projection',
  'layers.token_embed.norm': f'{_LAYER}.post_per_layer_input_norm',
  'token_embeds.table': 'model.embed_tokens_per_layer',
  'token_embeds.project': 'model.per_layer_model_projection',
  'token_embeds.norm': 'model.per_layer_projection_norm',
}
HF_ARRAYS = {
  'layers.scalar': f'{_LAYER}.layer_scalar',
  'layers.mlp.sparse.router.scale': f'{_LAYER}.router.scale',
  'layers.mlp.sparse.router.expert_scale': f'{_LAYER}.router.per_expert_scale',
  'layers.mlp.sparse.experts.gate_up.kernel': f'{_LAYER}.experts.gate_up_proj',
  'layers.mlp.sparse.experts.down.kernel': f'{_LAYER}.experts.down_proj',
}


def hf_config(source: HfWeights) -> DecoderConfig:
  """The config of an HF folder with model_type gemma4_text, or of the text model of gemma4.

  Raises:
    ValueError: a field that is missing, unknown, or of a value that is not supported.
  """
  f = hugging_face.fields_of(source)
  sizes = hugging_face.sizes(f, head_dim=256, tied=True)
  rope, local_rope = _ropes(f)
  bias = f.take('attention_bias', bool, False)
  config = DecoderConfig(
    family='gemma4',
    **sizes,
    embed_scale=sizes['embed'] ** 0.5,
    activation=f.choose('hidden_activation', hugging_face.ACTIVATIONS, 'gelu_pytorch_tanh'),
    rope=rope,
    local_rope=local_rope,
    windows=_windows(f, sizes['layers']),
    attention_scale=1.0,
    logit_softcap=f.take('final_logit_softcapping', float, None),
    qk_norm=True,
    value_norm=True,
    post_norms=True,
    layer_scalar=True,
    qkv_bias=bias,
    o_bias=bias,
    experts=_experts(f),
    **_global_heads(f),
    **_per_layer(f, sizes),
  )
  f.expect('use_bidirectional_attention', 'vision', False)
  f.finish((*hugging_face.HARMLESS, *hugging_face.HARMLESS_EXPERTS))
  return config


def _windows(f: Fields, layers: int) -> tuple[int, ...]:
  """The last layer sees all tokens whatever else is said."""
  told = gemma2.windows(f, layers, f.count('sliding_window', 512), PATTERN)
  return (*told[:-1], 0)


def _global_heads(f: Fields) -> dict[str, Any]:
  same = f.take('attention_k_eq_v', bool, False)
  kv_heads = f.take('num_global_key_value_heads', int, None)  # counts only where values are keys
  return dict(
    global_head_dim=f.count('global_head_dim', 512),
    global_kv_heads=kv_heads if same else None,
    keys_are_values=same,
  )


def _experts(f: Fields) -> Experts | None:
  options = [
    f.take(n, int, None) for n in ('num_experts', 'top_k_experts', 'moe_intermediate_size')
  ]
  if not f.take('enable_moe_block', bool, False):
    return None
  for name, value in zip(('count', 'chosen', 'width'), options, strict=True):
    if value is None:
      raise ValueError(f'{f.subject} has enable_moe_block, but not the {name} of its experts.')
  count, chosen, width = (int(value or 0) for value in options)
  return Experts(count=count, chosen=chosen, width=width, layout='halves', beside_mlp=True)


def _per_layer(f: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
  size = f.take('hidden_size_per_layer_input', int, 0)
  vocab = f.take('vocab_size_per_layer_input', int, sizes['vocab'])
  shared, wide = f.take('num_kv_shared_layers', int, 0), f.take('use_double_wide_mlp', bool, False)
  return dict(
    per_layer_embed=size,
    per_layer_vocab=vocab if size else 0,
    shared_keys=shared,
    shared_keys_mlp=2 * sizes['mlp'] if wide and shared else None,
  )


def _ropes(f: Fields) -> tuple[Rope, Rope]:
  """The rotary embeddings of global and local layers."""
  both = Fields(f.take('rope_parameters', dict, {}), f'{f.subject}, rope_parameters')
  defaults = {'rope_type': 'proportional', 'partial_rotary_factor': FRACTION}
  full = both.take('full_attention', dict, defaults)
  local = both.take('sliding_attention', dict, {})
  both.finish()
  where = f'{f.subject}, rope'
  return (
    hugging_face.read_rope(full, where, theta=GLOBAL_THETA),
    hugging_face.read_rope(local, where, theta=LOCAL_THETA),
  )


def _view(source: HfWeights) -> PlainView:
  wrapped = source.config.get('model_type') == 'gemma4'
  return TextView(source, WRAPPED) if wrapped else PlainView(source)


def _unread(config: DecoderConfig) -> tuple[str, ...]:
  """Layers that read the keys of earlier ones have some of their own in published files."""
  first = config.layers - config.shared_keys
  of = '|'.join(str(i) for i in range(first, config.layers))
  return (rf'model\.layers\.({of})\.self_attn\.(k_proj|v_proj|k_norm)\.weight',) if of else ()


def _size() -> dict[str, Any]:
  return {
    'vocab_size': 262_144,
    'hidden_size': 2816,
    'intermediate_size': 2112,
    'moe_intermediate_size': 704,
    'num_hidden_layers': 30,
    'num_attention_heads': 16,
    'num_key_value_heads': 8,
    'num_global_key_value_heads': 2,
    'attention_k_eq_v': True,
    'enable_moe_block': True,
    'num_experts': 128,
    'top_k_experts': 8,
    'max_position_embeddings': 262_144,
    'rms_norm_eps': 1e-6,
    'sliding_window': 1024,
    'final_logit_softcapping': 30.0,
  }


FAMILY = Family(
  formats={
    'hf': Format(
      config=hf_config,
      weights=WeightMap(modules=HF_MODULES, arrays=HF_ARRAYS, unread=_unread),
      view=_view,
    )
  },
  model_types=('gemma4_text', 'gemma4'),
  sizes={'gemma4-26b-a4b': _size()},
)
_registry.families.register('gemma4')(FAMILY)

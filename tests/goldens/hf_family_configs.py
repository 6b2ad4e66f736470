"""The tiny config.json of each golden that make_hf_families.py writes, and why it is there."""

from tests.goldens.hf_base_configs import (
  DEEPSEEK_V3,
  GEMMA2,
  GEMMA4,
  GEMMA4_MOE,
  GPT_OSS,
  MIXTRAL,
  QWEN3,
  QWEN3_MOE,
  QWEN3_NEXT,
  without,
)
from tests.goldens.make_hf_tiny import FULL, GEMMA3, LLAMA, LLAMA3_ROPE, SLIDING

LINEAR = 'linear_attention'
BF16 = {'torch_dtype': 'bfloat16'}
UNQUANTIZED = ('model.layers.*.self_attn', 'model.layers.*.mlp.router')

CONFIGS = {
  'gemma2': GEMMA2,
  # No caps, an untied head, biases, and a stack that begins with a global layer.
  'gemma2_plain': GEMMA2
  | {
    'attention_bias': True,
    'attn_logit_softcapping': None,
    'final_logit_softcapping': None,
    'layer_types': [FULL, SLIDING, SLIDING],
    'num_hidden_layers': 3,
    'num_key_value_heads': 4,
    'tie_word_embeddings': False,
  }
  | BF16,
  # As Gemma 3 4B is published: the text model inside a multimodal checkpoint.
  'gemma3_wrapped': {
    'model_type': 'gemma3',
    'architectures': ['Gemma3ForConditionalGeneration'],
    'boi_token_index': 95,
    'eoi_token_index': 96,
    'image_token_index': 97,
    'eos_token_id': [1, 98],
    'mm_tokens_per_image': 4,
    'text_config': GEMMA3 | {'num_hidden_layers': 4, 'sliding_window_pattern': 3},
    'vision_config': {
      'model_type': 'siglip_vision_model',
      'hidden_size': 8,
      'image_size': 8,
      'intermediate_size': 12,
      'num_attention_heads': 2,
      'num_hidden_layers': 1,
      'patch_size': 2,
      'vision_use_head': False,
    },
  }
  | BF16,
  # The sixth layer is global by the pattern, the seventh because it is the last.
  'gemma4': GEMMA4,
  'gemma4_moe': GEMMA4_MOE,
  # As E2B: embeddings per layer, keys and values reused by the last layers, twice as wide there.
  'gemma4_ple': GEMMA4
  | {
    'attention_k_eq_v': False,
    'hidden_size_per_layer_input': 6,
    'layer_types': [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
    'num_global_key_value_heads': None,
    'num_hidden_layers': 6,
    'num_kv_shared_layers': 3,
    'use_double_wide_mlp': True,
    'vocab_size_per_layer_input': 101,
  },
  # As 26B-A4B is published: the text model inside a multimodal checkpoint.
  'gemma4_wrapped': {
    'model_type': 'gemma4',
    'architectures': ['Gemma4ForConditionalGeneration'],
    'boi_token_id': 93,
    'eoi_token_id': 94,
    'image_token_id': 95,
    'video_token_id': 96,
    'boa_token_id': 97,
    'eoa_token_index': 98,
    'audio_token_id': 99,
    'text_config': GEMMA4_MOE | {'layer_types': [SLIDING, FULL], 'num_hidden_layers': 2},
    'tie_word_embeddings': True,
    'vision_config': {
      'model_type': 'gemma4_vision',
      'head_dim': 4,
      'hidden_size': 8,
      'intermediate_size': 12,
      'num_attention_heads': 2,
      'num_hidden_layers': 1,
      'num_key_value_heads': 2,
      'patch_size': 2,
      'position_embedding_size': 6,
    },
  }
  | BF16,
  # As Llama 3.2: a tied head and scaled rope.
  'llama32': LLAMA
  | {
    'head_dim': 16,
    'num_attention_heads': 4,
    'num_key_value_heads': 1,
    'rope_scaling': LLAMA3_ROPE | {'factor': 32.0},
    'rope_theta': 500000.0,
    'tie_word_embeddings': True,
  }
  | BF16,
  'qwen3': QWEN3,
  # Windows in the last layers, yarn as Qwen's manual has it, an untied head, biases.
  'qwen3_window': QWEN3
  | {
    'attention_bias': True,
    'max_position_embeddings': 512,
    'max_window_layers': 2,
    'num_hidden_layers': 5,
    'num_key_value_heads': 1,
    'rope_scaling': {
      'factor': 4.0,
      'original_max_position_embeddings': 128,
      'rope_type': 'yarn',
    },
    'rope_theta': 10000,
    'sliding_window': 5,
    'tie_word_embeddings': False,
    'use_sliding_window': True,
  }
  | BF16,
  'qwen3_moe': QWEN3_MOE,  # in three files with an index
  # Dense layers between sparse ones: 0 and 2 by the step, 3 by name. Weights that do not sum to 1.
  'qwen3_moe_mixed': QWEN3_MOE
  | {
    'decoder_sparse_step': 2,
    'mlp_only_layers': [3],
    'norm_topk_prob': False,
    'num_experts': 4,
    'num_experts_per_tok': 3,
    'num_hidden_layers': 6,
    'sliding_window': 5,
    'tie_word_embeddings': True,
    'use_sliding_window': True,
  }
  | BF16,
  'qwen3_next': QWEN3_NEXT,
  # Longer than a chunk of the delta rule (64), a dense layer, other sizes.
  'qwen3_next_long': without(QWEN3_NEXT, 'full_attention_interval')
  | {
    'attention_bias': True,
    'layer_types': [LINEAR, FULL, LINEAR],
    'linear_conv_kernel_dim': 3,
    'linear_num_key_heads': 1,
    'linear_num_value_heads': 3,
    'mlp_only_layers': [0],
    'norm_topk_prob': False,
    'num_hidden_layers': 3,
    'partial_rotary_factor': 0.5,
    'tie_word_embeddings': True,
  },
  'gpt_oss': GPT_OSS,
  # A low limit that clamps often, a truncated yarn range, the newer spelling of rope.
  'gpt_oss_clamped': without(GPT_OSS, 'layer_types', 'rope_scaling', 'rope_theta')
  | {
    'max_position_embeddings': 2048,
    'num_experts_per_tok': 3,
    'num_key_value_heads': 4,
    'rope_parameters': {
      'factor': 8.0,
      'original_max_position_embeddings': 256,
      'rope_theta': 10000.0,
      'rope_type': 'yarn',
    },
    'swiglu_limit': 0.75,
  },
  # As published: the experts in blocks of 32 four-bit numbers with a common exponent.
  'gpt_oss_mxfp4': GPT_OSS
  | {
    'hidden_size': 64,
    'intermediate_size': 32,
    'layer_types': [SLIDING, FULL],
    'num_hidden_layers': 2,
    'num_local_experts': 4,
    'quantization_config': {
      'modules_to_not_convert': [*UNQUANTIZED, 'model.embed_tokens', 'lm_head'],
      'quant_method': 'mxfp4',
    },
  },
  'deepseek_v3': DEEPSEEK_V3,
  # No low-rank queries, half-rotated rope with a scale on cos and sin, several shared experts.
  'deepseek_v3_plain': DEEPSEEK_V3
  | {
    'attention_bias': True,
    'first_k_dense_replace': 2,
    'max_position_embeddings': 2560,
    'n_group': 1,
    'n_routed_experts': 5,
    'n_shared_experts': 2,
    'norm_topk_prob': False,
    'num_hidden_layers': 3,
    'q_lora_rank': None,
    'rope_interleave': False,
    'rope_scaling': {
      'factor': 8.0,
      'mscale': 1.0,
      'mscale_all_dim': 0.5,
      'original_max_position_embeddings': 320,
      'rope_type': 'yarn',
    },
    'tie_word_embeddings': True,
    'topk_group': 1,
  },
  'mixtral': MIXTRAL,
  'mixtral_window': MIXTRAL
  | {
    'head_dim': 16,
    'num_experts_per_tok': 3,
    'num_hidden_layers': 2,
    'num_key_value_heads': 3,
    'num_local_experts': 5,
    'sliding_window': 5,
    'tie_word_embeddings': True,
  },
}

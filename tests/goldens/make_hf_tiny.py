"""Writes hf/NAME/{config.json, model.safetensors, logits.npz}: tiny checkpoints and their logits.

  pip install torch==2.13.0 transformers==5.24.0   (Python 3.11, CPU)
  python make_hf_tiny.py hf

Every config is read back by transformers from the folder that it is written to, so that the
reference and our loader read the same config.json. Weights are random but far from the usual
initialisation (scales, biases, norms): each term matters. logits.npz: tokens [2, length] int32,
logits [2, length, vocab] float32, computed in float64 from the stored weights.

transformers 5.24 stores attn_logit_softcapping of Gemma 3 and does not use it; the cap of its own
eager attention is switched on by the keyword `softcap` here.
"""

import json
import pathlib
import sys

import numpy as np
import safetensors.torch
import torch
import transformers

LENGTH = 40
LLAMA = {
  'model_type': 'llama',
  'architectures': ['LlamaForCausalLM'],
  'vocab_size': 96,
  'hidden_size': 32,
  'intermediate_size': 56,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'hidden_act': 'silu',
  'max_position_embeddings': 128,
  'rms_norm_eps': 1e-5,
  'rope_theta': 10000.0,
  'rope_scaling': None,
  'attention_bias': False,
  'mlp_bias': False,
  'tie_word_embeddings': False,
  'torch_dtype': 'float32',
}
GEMMA3 = {
  'model_type': 'gemma3_text',
  'architectures': ['Gemma3ForCausalLM'],
  'vocab_size': 101,
  'hidden_size': 24,
  'intermediate_size': 24,
  'num_hidden_layers': 7,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 16,
  'hidden_activation': 'gelu_pytorch_tanh',
  'max_position_embeddings': 128,
  'rms_norm_eps': 1e-6,
  'query_pre_attn_scalar': 10,
  'rope_theta': 1000000.0,
  'rope_local_base_freq': 10000.0,
  'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
  'sliding_window': 6,
  'sliding_window_pattern': 3,
  'final_logit_softcapping': None,
  'attn_logit_softcapping': None,
  'attention_bias': False,
  'torch_dtype': 'float32',
}
LLAMA3_ROPE = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 64,
}
FULL, SLIDING = 'full_attention', 'sliding_attention'
CONFIGS = {
  'llama': LLAMA,
  'llama_tied': LLAMA
  | {
    'hidden_size': 24,
    'num_attention_heads': 3,
    'num_key_value_heads': 1,
    'num_hidden_layers': 2,
    'intermediate_size': 41,
    'tie_word_embeddings': True,
    'torch_dtype': 'bfloat16',
  },
  'llama31': LLAMA
  | {'rope_theta': 500000.0, 'rope_scaling': LLAMA3_ROPE, 'head_dim': 16, 'num_hidden_layers': 2},
  'llama_bias': LLAMA
  | {
    'attention_bias': True,
    'mlp_bias': True,
    'rope_theta': None,
    'rope_parameters': {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 20000.0},
  },
  'gemma3': GEMMA3,
  'gemma3_caps': GEMMA3
  | {
    'final_logit_softcapping': 3.0,
    'attn_logit_softcapping': 2.0,
    'num_hidden_layers': 4,
    'num_key_value_heads': 2,
    'layer_types': [SLIDING, FULL, SLIDING, SLIDING],
    'rope_parameters': {
      FULL: {'rope_type': 'default', 'rope_theta': 500000.0},
      SLIDING: {'rope_type': 'default', 'rope_theta': 3000.0},
    },
    'rope_scaling': None,
    'rope_theta': None,
    'rope_local_base_freq': None,
    'sliding_window_pattern': None,
  },
}


def main(output: str) -> None:
  for seed, (name, config) in enumerate(CONFIGS.items()):
    folder = pathlib.Path(output) / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in config.items() if v is not None}
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    write_weights(folder, seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, attn_implementation='eager', dtype=torch.float32
    )
    model = model.double().eval()
    tokens = torch.from_numpy(
      np.random.default_rng(seed).integers(0, config['vocab_size'], (2, LENGTH))
    )
    cap = config.get('attn_logit_softcapping')
    with torch.no_grad():
      logits = model(tokens, **({'softcap': cap} if cap else {})).logits
    print(
      name,
      tuple(logits.shape),
      'scale',
      float(logits.abs().max()),
      'parameters',
      model.num_parameters(),
    )
    np.savez_compressed(
      folder / 'logits.npz',
      tokens=tokens.numpy().astype(np.int32),
      logits=logits.numpy().astype(np.float32),
    )


def write_weights(folder: pathlib.Path, seed: int) -> None:
  """Writes random weights under the names and shapes that transformers gives."""
  config = transformers.AutoConfig.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_config(config)
  rng = torch.Generator().manual_seed(seed)
  tensors = {}
  for path, p in model.named_parameters():
    scale = 0.3 if p.ndim == 1 else 1.5 * p.shape[-1] ** -0.5
    center = p.detach().float() if 'norm' in path else 0.0  # 1 in llama, 0 (meaning 1 + w) in gemma
    w = center + scale * torch.randn(p.shape, generator=rng)
    tensors[path] = w.to(config.dtype).contiguous()
  safetensors.torch.save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})


if __name__ == '__main__':
  main(*sys.argv[1:])

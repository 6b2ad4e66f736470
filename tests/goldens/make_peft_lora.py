"""Writes peft_lora/: a tiny random Llama, LoRA adapters saved by PEFT, the logits of each.

  pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2   (Python 3.11, CPU)
  python make_peft_lora.py peft_lora

base/        config.json, model.safetensors: 2 layers, embed 16, 4 heads, 2 kv heads, vocab 40,
             untied
plain/       rank 4, alpha 8, all seven projections
patterns/    rsLoRA, rank 2, alpha 3, a rank_pattern, an alpha_pattern; q, v, down
embedding/   rank 3, alpha 6, bfloat16; q and the embedding (PEFT adds the base's embedding)
logits.npz   tokens [2, 12] int32; base, plain, patterns, embedding [2, 12, 40] float32;
             delta_NAME [out, in]: what PEFT adds to layer 1's q_proj

Factors are random, so that every term matters. Logits are computed in float64 from what is stored.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers

BASE = {
  'model_type': 'llama',
  'architectures': ['LlamaForCausalLM'],
  'vocab_size': 40,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'hidden_act': 'silu',
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-5,
  'rope_theta': 10000.0,
  'attention_bias': False,
  'mlp_bias': False,
  'tie_word_embeddings': False,
  'torch_dtype': 'float32',
}
ALL = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
ADAPTERS = {
  'plain': dict(r=4, lora_alpha=8, target_modules=ALL),
  'patterns': dict(
    r=2,
    lora_alpha=3,
    use_rslora=True,
    target_modules=['q_proj', 'v_proj', 'down_proj'],
    rank_pattern={'v_proj': 3, 'layers.1.self_attn.q_proj': 4},
    alpha_pattern={'layers.0.mlp.down_proj': 5, '.*1.self_attn.q_proj': 7},
  ),
  'embedding': dict(r=3, lora_alpha=6, target_modules=['embed_tokens', 'q_proj']),
}


def randomise(module: torch.nn.Module, std: float, seed: int) -> None:
  generator = torch.Generator().manual_seed(seed)
  for name, value in sorted(module.named_parameters()):
    if value.requires_grad:
      mean = 1.0 if name.endswith('norm.weight') else 0.0
      value.data = mean + std * torch.randn(value.shape, generator=generator)


def main(output: str) -> None:
  root = pathlib.Path(output)
  base = root / 'base'
  base.mkdir(parents=True, exist_ok=True)
  (base / 'config.json').write_text(json.dumps(BASE, indent=2) + '\n')

  def load() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

  config = transformers.AutoConfig.from_pretrained(base)
  model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
  randomise(model, 0.3, 0)
  model.save_pretrained(root / 'written')
  (root / 'written' / 'model.safetensors').replace(base / 'model.safetensors')
  for file in (root / 'written').iterdir():
    file.unlink()
  (root / 'written').rmdir()

  tokens = np.random.default_rng(0).integers(0, BASE['vocab_size'], (2, 12))
  arrays = {'tokens': tokens.astype(np.int32)}

  def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
      return model.double().eval()(torch.from_numpy(tokens)).logits.numpy().astype(np.float32)

  arrays['base'] = logits(load())
  for seed, (name, fields) in enumerate(ADAPTERS.items(), start=1):
    adapted = peft.get_peft_model(load(), peft.LoraConfig(task_type='CAUSAL_LM', **fields))
    randomise(adapted, 0.3, seed)
    if name == 'embedding':  # stored in half the width
      for key, value in adapted.named_parameters():
        if 'lora_' in key:
          value.data = value.data.bfloat16()
    adapted.peft_config['default'].base_model_name_or_path = 'tiny-random-llama'
    adapted.save_pretrained(root / name)
    (root / name / 'README.md').unlink()
    again = peft.PeftModel.from_pretrained(load(), root / name)
    arrays[name] = logits(again)
    layer = again.base_model.model.model.layers[1].self_attn.q_proj
    arrays[f'delta_{name}'] = layer.get_delta_weight('default').numpy().astype(np.float32)
    print(name, np.abs(arrays[name] - arrays['base']).max())
  np.savez_compressed(root / 'logits.npz', **arrays)


if __name__ == '__main__':
  main(sys.argv[1])

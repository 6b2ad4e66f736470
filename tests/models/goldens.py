"""Where the goldens lie, and checkpoints made from them: edited HF folders, and GGUF files."""

import json
import pathlib
import shutil

import gguf
import numpy as np

from peftlab.formats.hf_weights import HfWeights
from peftlab.formats.safetensors_file import write_safetensors

FOLDER = pathlib.Path(__file__).parent.parent / 'goldens'
HF = FOLDER / 'hf'


def edited(name, folder, config=None, tensors=None):
  """A copy of a golden HF folder with fields of its config, or tensors, changed (None: removed)."""
  shutil.copytree(HF / name, folder, dirs_exist_ok=True)
  source = HfWeights(HF / name)
  changed = {**source.config, **(config or {})}
  (folder / 'config.json').write_text(json.dumps(changed))
  weights = {**source, **(tensors or {})}
  kept = {k: v for k, v in weights.items() if v is not None}
  write_safetensors(folder / 'model.safetensors', kept)
  return folder


LAYER_NAMES = {
  'input_layernorm': 'attn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'self_attn.q_norm': 'attn_q_norm',
  'self_attn.k_norm': 'attn_k_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
NORMS = {
  'llama': {'post_attention_layernorm': 'ffn_norm'},
  'gemma3': {
    'post_attention_layernorm': 'post_attention_norm',
    'pre_feedforward_layernorm': 'ffn_norm',
    'post_feedforward_layernorm': 'post_ffw_norm',
  },
}
TOP_NAMES = {'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output'}


def gguf_name(name, architecture):
  """An HF tensor's name in GGUF."""
  module, leaf = name.rsplit('.', 1)
  if module in TOP_NAMES:
    return f'{TOP_NAMES[module]}.{leaf}'
  _, _, layer, rest = module.split('.', 3)
  return f'blk.{layer}.{(LAYER_NAMES | NORMS[architecture])[rest]}.{leaf}'


def permuted(weight, heads):
  """Rows of q or k as llama.cpp's converter orders them (`permute` of convert_hf_to_gguf.py)."""
  rows = weight.shape[0]
  halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
  return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(source, path, architecture, keys, tensors=None):
  """An HF folder as a GGUF file, float32, as llama.cpp's converter would write it.

  Args:
    source: HfWeights.
    path: of the file.
    architecture: llama or gemma3.
    keys: its metadata, without the architecture in front.
    tensors: further tensors.
  """
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in keys.items():
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
    add(f'{architecture}.{key}', value)
  config = source.config
  heads = {'q': config['num_attention_heads'], 'k': config['num_key_value_heads']}
  for name, array in source.items():
    array = np.asarray(array, np.float32)
    part = name.split('self_attn.')[-1][:2]
    if architecture == 'llama' and part in ('q_', 'k_'):
      array = permuted(array, heads[part[0]])
    if architecture == 'gemma3' and 'norm' in name:
      array = array + 1
    writer.add_tensor(gguf_name(name, architecture), np.ascontiguousarray(array))
  for name, array in (tensors or {}).items():
    writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def gguf_keys(config):
  """The metadata keys that both architectures need."""
  return {
    'block_count': config['num_hidden_layers'],
    'context_length': config['max_position_embeddings'],
    'embedding_length': config['hidden_size'],
    'feed_forward_length': config['intermediate_size'],
    'attention.head_count': config['num_attention_heads'],
    'attention.head_count_kv': config['num_key_value_heads'],
    'attention.layer_norm_rms_epsilon': config['rms_norm_eps'],
    'rope.freq_base': config['rope_theta'],
  }

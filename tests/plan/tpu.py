"""A small decoder, big enough that the TPU compiler treats it as it treats large ones."""

import json

import pytest

from peftlab.plan import topology
from peftlab.plugins.lora import LoRA
from peftlab.train import config

TOPOLOGY = 'v6e:2x2'
needs_libtpu = pytest.mark.skipif(topology.missing() is not None, reason=str(topology.missing()))

# As config.json of a Llama: 4 heads of 64, hidden 256, mlp 512, vocabulary 512.
LLAMA = {
  'model_type': 'llama',
  'vocab_size': 512,
  'hidden_size': 256,
  'intermediate_size': 512,
  'num_attention_heads': 4,
  'num_key_value_heads': 4,
  'max_position_embeddings': 512,
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': True,
}


def folder(path, layers):
  path.mkdir(exist_ok=True)
  text = json.dumps(LLAMA | {'num_hidden_layers': layers})
  (path / 'config.json').write_text(text)
  return str(path)


def experiment(source, *, applier='scan', **mesh):
  return config.Experiment(
    name='small',
    base=config.BaseConfig(source=source, dtype='bfloat16', applier=applier, remat='full'),
    mesh=config.MeshConfig(**mesh),
    adapter=LoRA(rank=8),
    where=('attn.q',),
    data=config.DataConfig(length=256, batch=4),
  )


def kernels():
  """Numbers in the kernels of one layer: 4 [256, 256] of attention, 3 [256, 512] of the mlp."""
  return 4 * 256 * 256 + 3 * 256 * 512


def flops(layers, *, unrolled=False, rows=4, length=256, rank=8):
  """Of matrix products in a step on one device, counted by hand: 2 x multiplications."""
  tokens, d, m, v = rows * length, 256, 512, 512
  kernels = 4 * d * d + 3 * d * m
  attention = 2 * length * d  # scores and values, for each token
  factors = rank * (d + d)
  # Forward; again in the backward pass, all but the last product of a layer; gradients of inputs,
  # of which a product of attention has two, and gradients of the factors.
  layer = tokens * (3 * kernels - d * m + 4 * attention + 4 * factors)
  total = layers * layer + tokens * 2 * d * v
  if unrolled:  # the first layer's input, keys and values have no gradient that anything needs
    total -= tokens * (3 * d * d + attention + rank * d)
  return 2 * total

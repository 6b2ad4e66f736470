"""Makes load_balancing.json: transformers' load-balancing loss of fixed logits, and its gradients.

python tests/goldens/make_load_balancing.py    # with torch and transformers 5.24.0
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

EXPERTS, CHOSEN, LAYERS, TOKENS = 8, 3, 2, 10
MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]  # of an example that is padded


def loss(logits, mask):
  """{'loss': number, 'gradient': [layers, tokens, experts]}."""
  layers = [torch.tensor(one, requires_grad=True) for one in logits]
  value = load_balancing_loss_func(tuple(layers), EXPERTS, CHOSEN, mask)
  value.backward()
  gradients = [[[float(f'{n:.7g}') for n in row] for row in one.grad.tolist()] for one in layers]
  return {'loss': value.item(), 'gradient': gradients}


def main():
  """Writes the file beside this one."""
  draw = np.random.default_rng(0)
  logits = [draw.normal(size=(TOKENS, EXPERTS)).astype(np.float32).round(3) for _ in range(LAYERS)]
  made = {
    'source': f'transformers {transformers.__version__}, mixtral load_balancing_loss_func',
    'experts': EXPERTS,
    'chosen': CHOSEN,
    'logits': [one.tolist() for one in logits],
    'mask': MASK,
    'all': loss(logits, None),
    'masked': loss(logits, torch.tensor(MASK)),
  }
  path = pathlib.Path(__file__).with_name('load_balancing.json')
  path.write_text(json.dumps(made) + '\n')


if __name__ == '__main__':
  main()

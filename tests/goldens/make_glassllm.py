"""Writes glassllm.npz: the decoders of the package glassllm run by its own numpy forward.

  pip install --no-deps glassllm==0.1.0
  python make_glassllm.py glassllm.npz

Holds, for `en` and `pt`: tokens [length] and float32 logits [length, vocab] of one short text.
"""

import pathlib
import sys

import glassllm
from glassllm.model import GlassLM
from glassllm.tokenizer import Tokenizer
import numpy as np

TEXTS = {
  'en': 'It was a quiet evening, and the old man walked slowly down to the river with his dog.',
  'pt': 'Era uma tarde tranquila, e o velho desceu devagar até o rio com o seu cachorro.',
}


def main(output: str) -> None:
  folder = pathlib.Path(glassllm.__file__).parent / 'weights'
  arrays = {}
  for name, text in TEXTS.items():
    tokens = np.array(Tokenizer.load(folder / f'{name}.tokenizer.json').encode(text))
    logits = GlassLM.load(folder / f'{name}.npz', dtype=np.float64).forward(tokens).data[0]
    arrays |= {
      f'{name}_tokens': tokens.astype(np.int32),
      f'{name}_logits': logits.astype(np.float32),
    }
    print(name, len(tokens), np.abs(logits).max())
  np.savez_compressed(output, **arrays)


if __name__ == '__main__':
  main(*sys.argv[1:])

"""Preset: LoRA on int8 weights in tiles of at most 128 inputs, the largest that the mesh divides.

  peftlab train --config=tiled_lora --config.base.source=MODEL --workdir=runs/tiled_lora

Differs from qlora_nf4 in base.quant: nearer to the weights than one scale per channel.
"""

import dataclasses

from peftlab.experiments import qlora_nf4
from peftlab.train.config import Experiment


def get_config(corpus: str = 'gsm8k') -> Experiment:
  """The config, for one text."""
  other = qlora_nf4.get_config(corpus)
  base = dataclasses.replace(other.base, quant='int8(tile=128)', tile='auto')
  return dataclasses.replace(other, name=f'{corpus}_tiled_lora', base=base)

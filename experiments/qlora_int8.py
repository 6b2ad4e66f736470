"""Preset: LoRA on int8 weights, one scale per output channel.

  peftlab train --config=qlora_int8 --config.base.source=MODEL --workdir=runs/qlora_int8

Differs from qlora_nf4 in base.quant and base.tile: 8.008 bits per weight of 4096 inputs.
"""

import dataclasses

from peftlab.experiments import qlora_nf4
from peftlab.train.config import Experiment


def get_config(corpus: str = 'gsm8k') -> Experiment:
  """The config, for one text."""
  other = qlora_nf4.get_config(corpus)
  base = dataclasses.replace(other.base, quant='int8', tile='0')
  return dataclasses.replace(other, name=f'{corpus}_qlora_int8', base=base)

"""QLoRA: LoRA of rank 8 on a SmolLM2 whose weights are nf4 with double quantization.

  peftlab train --config=experiments/smollm2_qlora_nf4.py --workdir=runs/smollm2_qlora_nf4
  make demo ARGS='--config=experiments/smollm2_qlora_nf4.py --workdir=runs/demo_nf4'   (two texts)

Differs from smollm2_lora in base.quant and base.tile alone.
Hardware: 2 CPU cores, 3 GB; about 4 minutes.
"""

import dataclasses

from peftlab.experiments import smollm2_lora
from peftlab.train.config import Experiment


def get_config(corpus: str = 'gsm8k') -> Experiment:
  """The config, for one text."""
  plain = smollm2_lora.get_config()
  return dataclasses.replace(
    plain,
    name=f'{corpus}_nf4',
    base=dataclasses.replace(plain.base, quant='nf4', tile='64'),
    data=dataclasses.replace(plain.data, corpus=corpus),
  )

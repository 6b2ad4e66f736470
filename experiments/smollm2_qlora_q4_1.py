"""QLoRA on SmolLM2 as its file holds it: Q4_1 blocks, kept as they are, so nothing is lost.

  peftlab train --config=experiments/smollm2_qlora_q4_1.py --workdir=runs/smollm2_qlora_q4_1
  make demo ARGS='--config=experiments/smollm2_qlora_q4_1.py --workdir=runs/demo_q4_1'   (two texts)

Differs from smollm2_lora in base.quant alone. The losses are those of smollm2_lora.
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
    name=f'{corpus}_q4_1',
    base=dataclasses.replace(plain.base, quant='file'),
    data=dataclasses.replace(plain.data, corpus=corpus),
  )

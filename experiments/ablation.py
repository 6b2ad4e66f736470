"""An ablation on a small base: adapter type x rank x learning rate x seed.

  make sweep-demo
  peftlab sweep --config=experiments/ablation.py --sweep=methods,rank --root=runs/ablation

Hardware: 2 CPU cores, 2 GB. What it gave: docs/sweeps.md.
"""

from collections.abc import Iterable

from peftlab.plugins.lora import LoRA
from peftlab.sweep import space
from peftlab.train.config import BaseConfig, DataConfig, Experiment, TrainConfig


def get_config() -> Experiment:
  """The config that the settings change."""
  return Experiment(
    name='ablation',
    base=BaseConfig(source='package:glassllm/en'),
    adapter=LoRA(rank=8, alpha=16),
    data=DataConfig(corpus='chitchat', length=127, batch=4, max_rows=2000, eval_rows=64),
    train=TrainConfig(
      steps=60, learning_rate=3e-3, checkpoint_every=30, samples=0, sample_tokens=0
    ),
  )


def sweep_methods() -> Iterable[space.Setting]:
  """Adapter types, each at three learning rates: one rate for all would favour one of them."""
  yield from space.methods(('lora', 'dora', 'pissa'), rates=(1e-3, 3e-3, 1e-2))


def sweep_rank() -> Iterable[space.Setting]:
  """Sizes."""
  for rank in (2, 8):
    yield {'adapter.rank': rank}


def sweep_lr() -> Iterable[space.Setting]:
  """Learning rates, for one type."""
  for rate in space.RATES:
    yield {'train.learning_rate': rate}

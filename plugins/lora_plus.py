"""LoRA+: B learns faster than A (Hayou et al. 2024, arXiv:2402.12354)."""

import dataclasses
import math
from typing import ClassVar

import peftlab
from peftlab.plugins import lora


@peftlab.register_adapter('lora_plus')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAPlus(lora.LowRank):
  """LoRA whose B has `ratio` times the learning rate. Trainable: rank (in + out) per kernel.

  Attributes:
    ratio: of the learning rates; `--config.train.role_rates=b=N` says another one.
  """

  bounds: ClassVar = {**lora.LowRank.bounds, 'ratio': (0, math.inf)}

  ratio: float = 16.0

  def slots(self):
    slots = super().slots()
    return slots | {'b': dataclasses.replace(slots['b'], rate=self.ratio)}

"""LoRA-FA: LoRA whose A keeps its random values (Zhang et al. 2023, arXiv:2308.03303)."""

import dataclasses

import peftlab
from peftlab.plugins import lora


@peftlab.register_adapter('lora_fa')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAFA(lora.LowRank):
  """y = x W + s (x A) B, A frozen: no input of a layer is kept. Trainable: rank out per kernel."""

  def slots(self):
    slots = super().slots()
    return slots | {'a': dataclasses.replace(slots['a'], trainable=False)}

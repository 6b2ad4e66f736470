"""rsLoRA: LoRA scaled so that high ranks learn (Kalajdzievski 2023, arXiv:2312.03732)."""

import dataclasses

import peftlab
from peftlab import initial
from peftlab.plugins import lora


@peftlab.register_adapter('rslora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class RsLoRA(lora.LoRA):
  """y = x W + s (x A) B, s = alpha / sqrt(rank). Trainable: rank (in + out) per kernel."""

  rslora: bool = initial(True)

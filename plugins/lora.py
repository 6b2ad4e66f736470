"""LoRA: y = x W + s (x A) B (Hu et al. 2021, https://arxiv.org/abs/2106.09685, eq. 3)."""

import dataclasses
import math

import jax

import peftlab
from peftlab import initial

INITS = {
  'he_uniform': jax.nn.initializers.he_uniform(),
  'gaussian': jax.nn.initializers.normal(0.02),
  'lecun_normal': jax.nn.initializers.lecun_normal(),
}


@peftlab.register_adapter('lora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(peftlab.Adapter):
  """Low-rank adaptation. Trainable: rank (in + out) per kernel [in, out].

  Attributes:
    rank: columns of A [in, rank] and rows of B [rank, out].
    alpha: the scale s is alpha / rank, or alpha / sqrt(rank) with rslora.
    rslora: rank-stabilized scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732).
    dropout: rate of dropout on the input of A, in training only.
    init: of A: he_uniform, gaussian or lecun_normal. B starts at 0.
  """

  rank: int = 8
  alpha: float = initial(16.0)
  rslora: bool = initial(False)
  dropout: float = 0.0
  init: str = initial('he_uniform')

  def slots(self):
    scale = self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
    return {
      'a': peftlab.Slot(dims='in rank', init=INITS[self.init]),
      'b': peftlab.Slot(dims='rank out'),
      'scale': peftlab.Slot(dims='', init=peftlab.constant(scale), trainable=False),
    }

  def apply(self, x, base, p):
    return base(x) + ((base.dropout(x, self.dropout) @ p.a) * p.scale) @ p.b

  def fuse(self, w, p):
    return w + (p.a * p.scale) @ p.b

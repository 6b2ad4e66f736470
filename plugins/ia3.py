"""(IA)^3: a learned factor for each output or input (Liu et al. 2022, arXiv:2205.05638)."""

import dataclasses

import jax

import peftlab


@peftlab.register_adapter('ia3')
@dataclasses.dataclass(frozen=True, kw_only=True)
class IA3(peftlab.Adapter):
  """y = l * (x W + b), or (l * x) W + b. Trainable: out per kernel, or in (section 3.3).

  Attributes:
    feedforward: whether the inputs are multiplied (the second layer of an MLP) instead of the
      outputs (keys and values).
  """

  additive = False

  feedforward: bool = False

  def slots(self):
    dims = 'in' if self.feedforward else 'out'
    return {'factor': peftlab.Slot(dims=dims, init=jax.nn.initializers.ones)}

  def apply(self, x, base, p):
    if self.feedforward:
      return base(x * p.factor)
    return base(x) * p.factor + base.bias() * (p.factor - 1)

  def fuse(self, w, p):
    return p.factor[:, None] * w if self.feedforward else w * p.factor

  def fuse_bias(self, b, p):
    return b if self.feedforward else b * p.factor

"""BitFit: only biases are trained (Ben Zaken et al. 2021, arXiv:2106.10199)."""

import dataclasses

import peftlab


@peftlab.register_adapter('bias')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bias(peftlab.Adapter):
  """y = x W + b', b' a copy of the layer's bias. Trainable: out per kernel that has a bias."""

  additive = False
  norms = True
  embeddings = False

  def slots(self):
    made = dict(of='bias', init=peftlab.copy, needs_weight=True)
    return {'bias': peftlab.Slot(dims='out', **made)}

  def apply(self, x, base, p):
    return base(x) + (p.bias - base.bias())

  def fuse(self, w, p):
    del p
    return w

  def fuse_bias(self, b, p):
    del b
    return p.bias

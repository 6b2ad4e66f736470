"""Full copies of chosen layers, norms and biases, trained in place of the base's own."""

import dataclasses

import peftlab


@peftlab.register_adapter('full')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(peftlab.Adapter):
  """y = x W' + b', W' and b' copies of the layer's own. Trainable: in out + out per kernel.

  Also for norms: with where='norm' it is the tuning of norms (Zhao et al. 2023, arXiv:2312.11420).
  """

  additive = False
  norms = True

  def slots(self):
    made = dict(init=peftlab.copy, needs_weight=True)
    return {
      'weight': peftlab.Slot(dims='in out', **made),
      'bias': peftlab.Slot(dims='out', of='bias', **made),
    }

  def apply(self, x, base, p):
    y = x @ p.weight
    return y + (p.bias - base.bias()) if 'bias' in p else y

  def fuse(self, w, p):
    del w
    return p.weight

  def fuse_bias(self, b, p):
    return p.bias if 'bias' in p else b

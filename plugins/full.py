"""Full copies of chosen layers, norms and biases, trained in place of the base's own."""

import dataclasses

import peftlab
from peftlab.formats.peft_form import Beside, PeftForm, Tensor

BIAS = Tensor('bias', 'bias', 'out -> out', on=('linear', 'norm'), optional=True)


@peftlab.register_adapter('full')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(peftlab.Adapter):
  """y = x W' + b', W' and b' copies of the layer's own. Trainable: in out + out per kernel.

  Also for norms: with where='norm' it is the tuning of norms (Zhao et al. 2023, arXiv:2312.11420).
  """

  additive = False
  peft = PeftForm(
    type='LN_TUNING',
    tensors=(
      Tensor('weight', 'ln_tuning_layers.weight', '1 out -> out', on=('norm',)),
      Tensor('bias', 'ln_tuning_layers.bias', 'out -> out', on=('norm',), optional=True),
    ),
  )
  peft_beside = Beside(
    key='modules_to_save',
    tensors=(
      Tensor('weight', 'weight', 'in out -> out in', on=('linear',)),
      Tensor('weight', 'weight', 'in out -> in out', on=('embedding',)),
      Tensor('weight', 'weight', '1 out -> out', on=('norm',)),
      BIAS,
    ),
    fields=lambda names, path: {} if path.endswith(tuple(names)) else None,
    value=sorted,
  )
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

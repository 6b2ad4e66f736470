"""LoHa: the product, number by number, of two low-rank matrices (Hyeon-Woo et al. 2021)."""

import dataclasses

import jax

import peftlab
from peftlab import initial
from peftlab.formats.peft_form import Key, PeftForm, Tensor


@peftlab.register_adapter('loha')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoHa(peftlab.Adapter):
  """y = x (W + s (A1 B1) * (A2 B2)), s = alpha / rank. Trainable: 2 rank (in + out) per kernel.

  arXiv:2108.06098, proposition 1; arXiv:2309.14859. The change has rank up to rank^2.

  Attributes:
    rank: of each of the two.
    alpha: see s.
  """

  peft = PeftForm(
    type='LOHA',
    keys={
      'rank': Key(name='r', default=8, least=1, pattern='rank_pattern'),
      'alpha': Key(name='alpha', default=8, pattern='alpha_pattern'),
    },
    tensors=(
      Tensor('a1', 'hada_w1_b', 'in rank -> rank in', on=('linear',)),
      Tensor('b1', 'hada_w1_a', 'rank out -> out rank', on=('linear',)),
      Tensor('a2', 'hada_w2_b', 'in rank -> rank in', on=('linear',)),
      Tensor('b2', 'hada_w2_a', 'rank out -> out rank', on=('linear',)),
    ),
    scale=('alpha', 'scale'),
    padded=('rank',),
    fixed={'use_effective_conv2d': (False, None)},
    neutral=('init_weights',),
    training=('rank_dropout', 'module_dropout'),
  )

  rank: int = 8
  alpha: float = initial(8.0)

  def slots(self):
    normal = jax.nn.initializers.normal
    scale = peftlab.constant(self.alpha / self.rank)
    return {
      'a1': peftlab.Slot(dims='in rank', init=normal(1.0), role='a'),
      'b1': peftlab.Slot(dims='rank out', init=normal(0.1), role='b'),
      'a2': peftlab.Slot(dims='in rank', role='a'),
      'b2': peftlab.Slot(dims='rank out', init=normal(1.0), role='b'),
      'scale': peftlab.Slot(dims='', init=scale, trainable=False),
    }

  def apply(self, x, base, p):
    return base(x) + (x @ self._delta(p)) * p.scale

  def fuse(self, w, p):
    return w + self._delta(p) * p.scale

  def _delta(self, p):
    return (p.a1 @ p.b1) * (p.a2 @ p.b2)

"""HiRA: the weight times a low-rank matrix, number by number (Huang et al. 2025, ICLR)."""

import dataclasses

import jax

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor


@peftlab.register_adapter('hira')
@dataclasses.dataclass(frozen=True, kw_only=True)
class HiRA(peftlab.Adapter):
  """y = x (W + W * (A B)). Trainable: rank (in + out) per kernel; the change has high rank.

  Attributes:
    rank: columns of A [in, rank] and rows of B [rank, out].
  """

  additive = False
  peft = PeftForm(
    type='HIRA',
    keys={'rank': Key(name='r', default=32, least=1)},
    tensors=(
      Tensor('a', 'hira_A', 'in rank -> rank in', on=('linear',)),
      Tensor('b', 'hira_B', 'rank out -> out rank', on=('linear',)),
      Tensor('a', 'hira_embedding_A', 'in rank -> rank in', on=('embedding',)),
      Tensor('b', 'hira_embedding_B', 'rank out -> out rank', on=('embedding',)),
    ),
    padded=('rank',),
    fixed={'rank_pattern': ({}, None)},
    neutral=('init_weights',),
    training=('hira_dropout',),
  )

  rank: int = 8

  def slots(self):
    return {
      'a': peftlab.Slot(dims='in rank', init=jax.nn.initializers.he_uniform()),
      'b': peftlab.Slot(dims='rank out'),
    }

  def apply(self, x, base, p):
    return base(x) + x @ (base.weight() * (p.a @ p.b))

  def fuse(self, w, p):
    return w + w * (p.a @ p.b)

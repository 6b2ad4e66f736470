"""LoHa: the product, number by number, of two low-rank matrices (Hyeon-Woo et al. 2021)."""

import dataclasses

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial
from peftlab.formats.peft_form import Key, PeftForm, Tensor


def tucker(a: jax.Array, core: jax.Array, b: jax.Array) -> jax.Array:
  """a [channels, r], core [r of b, r of a, taps], b [r, out] -> [(channels taps), out]."""
  whole = jnp.einsum('ci,jit,jo->cto', a, core, b)
  return whole.reshape(-1, whole.shape[-1])


@peftlab.register_adapter('loha')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoHa(peftlab.Adapter):
  """y = x (W + s (A1 B1) * (A2 B2)), s = alpha / rank. Trainable: 2 rank (in + out) per kernel.

  arXiv:2108.06098, proposition 1; arXiv:2309.14859. The change has rank up to rank^2.

  Attributes:
    rank: of each of the two.
    alpha: see s.
    effective: of a convolution the two are sum_ij A[channel, i] T[i, j, tap] B[j, out], with T
      [rank, rank, taps] (proposition 3): 2 rank (channels + out + rank taps).
  """

  peft = PeftForm(
    type='LOHA',
    keys={
      'rank': Key(name='r', default=8, least=1, pattern='rank_pattern'),
      'alpha': Key(name='alpha', default=8, pattern='alpha_pattern'),
      'effective': Key(name='use_effective_conv2d', default=False),
    },
    tensors=(
      Tensor('a1', 'hada_w1_b', 'in rank -> rank in', on=('linear',)),
      Tensor('b1', 'hada_w1_a', 'rank out -> out rank', on=('linear',)),
      Tensor('a2', 'hada_w2_b', 'in rank -> rank in', on=('linear',)),
      Tensor('b2', 'hada_w2_a', 'rank out -> out rank', on=('linear',)),
    ),
    scale=('alpha', 'scale'),
    padded=('rank',),
    neutral=('init_weights',),
    training=('rank_dropout', 'module_dropout'),
  )

  rank: int = 8
  alpha: float = initial(8.0)
  effective: bool = False

  def sizes(self, kernel):
    return {'cores': self.rank if self.effective and kernel['taps'] > 1 else 0}

  def slots(self):
    normal = jax.nn.initializers.normal
    scale = peftlab.constant(self.alpha / self.rank)
    a = 'channels rank' if self.effective else 'in rank'
    core = peftlab.Slot(dims='cores cores taps', init=normal(0.1))
    return {
      'a1': peftlab.Slot(dims=a, init=normal(1.0), role='a'),
      'b1': peftlab.Slot(dims='rank out', init=normal(0.1), role='b'),
      'a2': peftlab.Slot(dims=a, role='a'),
      'b2': peftlab.Slot(dims='rank out', init=normal(1.0), role='b'),
      't1': core,
      't2': core,
      'scale': peftlab.Slot(dims='', init=scale, trainable=False),
    }

  def apply(self, x, base, p):
    return base(x) + (x @ self._delta(p)) * p.scale

  def fuse(self, w, p):
    return w + self._delta(p) * p.scale

  def _delta(self, p):
    if 't1' not in p:
      return (p.a1 @ p.b1) * (p.a2 @ p.b2)
    return tucker(p.a1, p.t1, p.b1) * tucker(p.a2, p.t2, p.b2)

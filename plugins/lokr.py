"""LoKr: a Kronecker product of two small matrices (Edalati et al. 2022, arXiv:2212.10650)."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial
from peftlab.formats.peft_form import Key, PeftForm, Tensor
from peftlab.plugins import loha


def factors_of(size: int, at_most: int = 0) -> tuple[int, int]:
  """(small, large) with small x large = size, nearest to its root, or small at most `at_most`."""
  root = min(at_most, math.isqrt(size)) if at_most else math.isqrt(size)
  small = next(n for n in range(root, 0, -1) if size % n == 0)
  return small, size // small


@peftlab.register_adapter('lokr')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoKr(peftlab.Adapter):
  """y = x (W + s P x Q), P [m, l], Q [n, k], in = m n, out = l k, s = alpha / rank.

  arXiv:2309.14859. Trainable: m l + n k; a matrix is made of rank-r factors, r (n + k), where r is
  below half of its longer side (P only with `both`). Of a convolution the channels are m n, and Q
  is [n taps, k].

  Attributes:
    rank: see above; with no factors it is only in s.
    alpha: see s.
    both: whether P may be made of factors too.
    factor: the largest m and l; 0: the divisors nearest to the roots of in and out.
    effective: a convolution's Q, if it is made of factors, is of n, k and a core [r, r, taps].
  """

  embeddings = False
  small: ClassVar = {'rank': 4}
  bounds: ClassVar = {'rank': (1, math.inf), 'factor': (0, math.inf)}

  peft = PeftForm(
    type='LOKR',
    keys={
      'rank': Key(name='r', default=8, least=1, pattern='rank_pattern'),
      'alpha': Key(name='alpha', default=8, pattern='alpha_pattern'),
      'both': Key(name='decompose_both', default=False),
      'effective': Key(name='use_effective_conv2d', default=False),
      'factor': Key(
        name='decompose_factor', default=-1, read=lambda n: max(n, 0), write=lambda n: n or -1
      ),
    },
    tensors=(
      Tensor('p', 'lokr_w1', 'm l -> l m', on=('linear',), optional=True),
      Tensor('p_a', 'lokr_w1_b', 'm p_rank -> p_rank m', on=('linear',), optional=True),
      Tensor('p_b', 'lokr_w1_a', 'p_rank l -> l p_rank', on=('linear',), optional=True),
      Tensor('q', 'lokr_w2', 'n k -> k n', on=('linear',), optional=True),
      Tensor('q_a', 'lokr_w2_b', 'n q_rank -> q_rank n', on=('linear',), optional=True),
      Tensor('q_b', 'lokr_w2_a', 'q_rank k -> k q_rank', on=('linear',), optional=True),
    ),
    scale=('alpha', 'scale'),
    fixed={'rank_dropout_scale': (False, None)},
    neutral=('init_weights',),
    training=('rank_dropout', 'module_dropout'),
  )

  rank: int = 8
  alpha: float = initial(8.0)
  both: bool = False
  factor: int = 0
  effective: bool = False

  def sizes(self, kernel):
    taps = kernel['taps']
    (m, n), (few, k) = (factors_of(kernel[side], self.factor) for side in ('channels', 'out'))
    thin_p, thin_q = self.both and 2 * self.rank < max(m, few), 2 * self.rank < max(n, k)
    core = thin_q and self.effective and taps > 1
    n, rows = n if core else n * taps, 0 if thin_q else n * taps
    sizes = {'p_rank': self.rank if thin_p else 0, 'q_rank': self.rank if thin_q else 0}
    sizes |= {'m': 0 if thin_p else m, 'l': 0 if thin_p else few, 'pm': m, 'pl': few}
    sizes |= {'n': rows, 'k': 0 if thin_q else k, 'qn': n, 'qk': k}
    return sizes | {'core': self.rank if core else 0}

  def slots(self):
    uniform = jax.nn.initializers.he_uniform()
    scale = peftlab.constant(self.alpha / self.rank)
    return {
      'p': peftlab.Slot(dims='m l'),
      'p_a': peftlab.Slot(dims='pm p_rank', init=uniform),
      'p_b': peftlab.Slot(dims='p_rank pl'),
      'q': peftlab.Slot(dims='n k', init=uniform),
      'q_a': peftlab.Slot(dims='qn q_rank', init=uniform),
      'q_b': peftlab.Slot(dims='q_rank qk', init=uniform),
      'q_t': peftlab.Slot(dims='core core taps', init=uniform),
      'scale': peftlab.Slot(dims='', init=scale, trainable=False),
    }

  def apply(self, x, base, p):
    first, second = self._pair(p)
    parts = x.reshape(*x.shape[:-1], first.shape[0], second.shape[0])
    y = jnp.einsum('...mn,ml,nk->...lk', parts, first, second)
    return base(x) + y.reshape(*x.shape[:-1], base.shape[1]) * p.scale

  def fuse(self, w, p):
    return w + jnp.kron(*self._pair(p)) * p.scale

  def _pair(self, p):
    first = p.p if 'p' in p else p.p_a @ p.p_b
    if 'q_t' in p:
      return first, loha.tucker(p.q_a, p.q_t, p.q_b)
    return first, p.q if 'q' in p else p.q_a @ p.q_b

"""RandLoRA: a full-rank change from frozen random bases (Albert et al. 2025, arXiv:2502.00987)."""

import dataclasses
import math

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial
from peftlab.formats.peft_form import Key, PeftForm, Tensor


@peftlab.register_adapter('randlora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class RandLoRA(peftlab.Adapter):
  """W + s sum of n bases B L A G. Trainable: n (rank + short), n = ceil(short / rank), per kernel.

  Short and long are the smaller and larger of in and out; L [rank] and G [short] are diagonal, one
  each per basis. A and B are random, frozen, and the same for all layers. A smaller rank means more
  bases, and more to train. Bases and ranks are paired as in PEFT (see tests/goldens/peft_zoo).

  Attributes:
    rank: of a basis.
    alpha: s is alpha / rank.
  """

  peft = PeftForm(
    type='RANDLORA',
    keys={
      'rank': Key(name='r', default=32, least=1),
      'alpha': Key(name='randlora_alpha', default=640),
    },
    tensors=(
      Tensor('scales', 'randlora_lambda', 'rank bases -> rank bases', on=('linear',)),
      Tensor('gamma', 'randlora_gamma', 'bases short -> bases short', on=('linear',)),
    ),
    shared=(
      Tensor('a', 'base_model.randlora_A', 'rank short -> rank 1 short'),
      Tensor('b', 'base_model.randlora_B', 'long bases rank -> long bases rank'),
    ),
    copies=('randlora_A', 'randlora_B'),
    scale=('alpha', 'scale'),
    fixed={'save_projection': (True,), 'sparse': (False,), 'very_sparse': (False,)},
    neutral=('init_weights', 'projection_prng_key'),
    training=('randlora_dropout',),
  )

  rank: int = 32
  alpha: float = initial(640.0)

  def sizes(self, kernel):
    short, long = sorted((kernel['in'], kernel['out']))
    return {'bases': math.ceil(short / self.rank), 'short': short, 'long': long}

  def slots(self):
    uniform = jax.nn.initializers.variance_scaling(1.0, 'fan_out', 'uniform')
    scale = peftlab.constant(self.alpha / self.rank)
    return {
      'scales': peftlab.Slot(dims='rank bases', role='b'),
      'gamma': peftlab.Slot(dims='bases short', init=_inverse_of_longer, role='a'),
      'a': peftlab.Slot(dims='rank short', init=uniform, trainable=False, shared=True),
      'b': peftlab.Slot(dims='long bases rank', init=uniform, trainable=False, shared=True),
      'scale': peftlab.Slot(dims='', init=scale, trainable=False),
    }

  def apply(self, x, base, p):
    first, second = self._factors(p)
    if base.shape[0] > base.shape[1]:
      return base(x) + (x @ second) @ first * p.scale
    return base(x) + (x @ first.T) @ second.T * p.scale

  def fuse(self, w, p):
    first, second = self._factors(p)
    delta = (second @ first) * p.scale
    return w + (delta if w.shape[0] > w.shape[1] else delta.T)

  def _factors(self, p):
    """(A with its factors [rank n, short], B [long, n rank])."""
    first = p.a[:, None, :] * p.scales[:, :, None] * p.gamma[None, :, :]
    return first.reshape(-1, first.shape[-1]), p.b.reshape(p.b.shape[0], -1)


def _inverse_of_longer(key, shape, dtype):
  del key
  return jnp.full(shape, 1 / max(shape), dtype)

"""BOFT: rotations as products of butterfly factors (Liu et al. 2023, arXiv:2311.06243)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor
from peftlab.plugins import rotations


def butterfly(size: int, block: int, factor: int) -> np.ndarray:
  """The order of the inputs for a factor: of 2^factor blocks, the halves at even places first."""
  half = block // 2
  halves = np.arange(size).reshape(-1, 2**factor * 2, half)
  return np.concatenate([halves[:, 0::2], halves[:, 1::2]], axis=1).reshape(-1)


@peftlab.register_adapter('boft')
@dataclasses.dataclass(frozen=True, kw_only=True)
class BOFT(peftlab.Adapter):
  """y = s * ((x R) W), R = R_m ... R_1. Trainable: m in block + out per kernel.

  Of the block^2 numbers of a block only the skew part counts.

  Attributes:
    block: size of a block, even; block 2^(factors - 1) must divide in.
    factors: m, how many butterfly factors.
  """

  additive = False
  embeddings = False
  peft = PeftForm(
    type='BOFT',
    keys={
      'block': Key(name='boft_block_size', default=4, least=2),
      'factors': Key(name='boft_n_butterfly_factor', default=1, least=1),
    },
    tensors=(
      Tensor('rotation', 'boft_R', 'factors n block twin -> factors n block twin'),
      Tensor('scale', 'boft_s', 'out -> out 1'),
    ),
    fixed={'boft_block_num': (0,)},
    neutral=('init_weights',),
    training=('boft_dropout',),
  )

  block: int = 4
  factors: int = 1

  def __post_init__(self):
    super().__post_init__()
    if self.block < 2 or self.block % 2 or self.factors < 1:
      raise ValueError(
        f'BOFT has block {self.block} and {self.factors} factors; block must be even and at least '
        '2, and there must be a factor.'
      )

  def sizes(self, kernel):
    ins, group = kernel['in'], self.block * 2 ** (self.factors - 1)
    if ins % group:
      raise ValueError(f'BOFT needs block 2^(factors - 1) = {group} to divide in, which is {ins}.')
    return {}

  def slots(self):
    return {
      'rotation': peftlab.Slot(dims='factors in/block block block'),
      'scale': peftlab.Slot(dims='out', init=jax.nn.initializers.ones),
    }

  def apply(self, x, base, p):
    return base(self._rotated(x, self._blocks(p))) * p.scale

  def fuse(self, w, p):
    return self._rotated(jnp.eye(w.shape[0], dtype=w.dtype), self._blocks(p)) @ w * p.scale

  def _blocks(self, p):
    return rotations.cayley((p.rotation - jnp.swapaxes(p.rotation, -1, -2)) / 2)

  def _rotated(self, x, blocks):
    for factor in reversed(range(self.factors)):
      order = butterfly(x.shape[-1], self.block, factor)
      x = rotations.rotated(x[..., order], blocks[factor])[..., np.argsort(order)]
    return x

"""BD-LoRA: a block-diagonal factor, each block at home on one device (Wang et al. 2025)."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial


@peftlab.register_adapter('bd_lora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class BDLoRA(peftlab.Adapter):
  """y = x W + s (x A) B, s = alpha / rank (arXiv:2510.23346).

  B is block-diagonal (side `out`, for kernels that are split by outputs) or A is (side `in`, for
  those split by inputs). Where `blocks` is a multiple of the devices that share a kernel, no device
  needs another's part of the thin product. Trainable: rank (in + out / blocks) per kernel, or
  rank (in / blocks + out).

  Attributes:
    rank: columns of A and rows of B, a multiple of blocks.
    blocks: how many; they must divide the side.
    side: whose factor is block-diagonal.
    alpha: see s.
  """

  small: ClassVar = {'rank': 4}
  bounds: ClassVar = {'rank': (1, math.inf), 'blocks': (1, math.inf)}

  rank: int = 8
  blocks: int = 2
  side: str = 'out'
  alpha: float = initial(16.0)

  def __post_init__(self):
    super().__post_init__()
    if self.side not in ('in', 'out'):
      raise ValueError(f"BDLoRA.side is {self.side!r}; expected 'in' or 'out'.")

  @property
  def embeddings(self):  # pyrefly: ignore[bad-override]
    """The outputs of a lookup have blocks; its inputs cannot be cut."""
    return self.side == 'out'

  def sizes(self, kernel):
    side = kernel[self.side]
    if side % self.blocks:
      raise ValueError(f'BDLoRA.blocks is {self.blocks}; it must divide {self.side}, {side} here.')
    return {}

  def slots(self):
    uniform = jax.nn.initializers.he_uniform()
    scale = peftlab.constant(self.alpha / self.rank)
    blocks = {'in': ('in rank/blocks', 'rank out'), 'out': ('in rank', 'rank/blocks out')}
    a, b = blocks[self.side]
    return {
      'a': peftlab.Slot(dims=a, init=uniform),
      'b': peftlab.Slot(dims=b),
      'scale': peftlab.Slot(dims='', init=scale, trainable=False),
    }

  def apply(self, x, base, p):
    n, (ins, outs) = self.blocks, base.shape
    if self.side == 'in':
      parts = x.reshape(*x.shape[:-1], n, ins // n)
      a = p.a.reshape(n, -1, p.a.shape[-1])
      thin = jnp.einsum('...ni,nir->...nr', parts, a) * p.scale
      y = jnp.einsum('...nr,nro->...o', thin, p.b.reshape(n, -1, p.b.shape[-1]))
    else:
      thin = (x @ p.a) * p.scale
      thin = thin.reshape(*thin.shape[:-1], n, self.rank // n)
      b = p.b.reshape(p.b.shape[0], n, -1)
      y = jnp.einsum('...nr,rno->...no', thin, b)
      y = y.reshape(*y.shape[:-2], outs)
    return base(x) + y

  def fuse(self, w, p):
    n = self.blocks
    if self.side == 'in':
      a = p.a.reshape(n, -1, p.a.shape[-1])
      delta = jnp.einsum('nir,nro->nio', a, p.b.reshape(n, -1, p.b.shape[-1]))
    else:
      a = p.a.reshape(p.a.shape[0], n, -1)
      delta = jnp.einsum('inr,rno->ino', a, p.b.reshape(p.b.shape[0], n, -1))
    return w + delta.reshape(w.shape) * p.scale

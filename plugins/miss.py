"""MiSS: one row of numbers for each input of a shard (Kang and Yin 2024, arXiv:2409.15371)."""

import dataclasses

import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor


@peftlab.register_adapter('miss')
@dataclasses.dataclass(frozen=True, kw_only=True)
class MiSS(peftlab.Adapter):
  """y = x W + sum of shards of x, times D [rank, out]. Trainable: rank out per kernel.

  W[i, o] + D[i mod rank, o]: where rank does not divide in, the last shard is shorter.

  Attributes:
    rank: inputs of a shard.

  The variants bat and mini are not offered: `init_weights` of a PEFT folder says so and is refused.
  """

  peft = PeftForm(
    type='MISS',
    keys={'rank': Key(name='r', default=64, least=1)},
    tensors=(Tensor('shared_rows', 'miss_block', 'rank out -> rank out', on=('linear',)),),
    fixed={'init_weights': (True, False)},
    neutral=('mini_r',),
    training=('miss_dropout',),
  )

  rank: int = 8

  def slots(self):
    return {'shared_rows': peftlab.Slot(dims='rank out', role='b')}

  def apply(self, x, base, p):
    ins = base.shape[0]
    shards = jnp.arange(ins)[:, None] % self.rank == jnp.arange(self.rank)[None, :]
    return base(x) + (x @ shards.astype(p.shared_rows.dtype)) @ p.shared_rows

  def fuse(self, w, p):
    return w + p.shared_rows[jnp.arange(w.shape[0]) % self.rank]

"""C3A: the change is made of circulant blocks (Chen et al. 2024, arXiv:2407.19342)."""

import dataclasses

import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor


@peftlab.register_adapter('c3a')
@dataclasses.dataclass(frozen=True, kw_only=True)
class C3A(peftlab.Adapter):
  """y = x (W + blocks of circulants / in). Trainable: in out / block per kernel.

  Attributes:
    block: size of a circulant; it must divide in and out.
  """

  embeddings = False
  peft = PeftForm(
    type='C3A',
    keys={'block': Key(name='block_size', default=256, least=1, pattern='block_size_pattern')},
    tensors=(Tensor('kernel', 'c3a_kernel', 'i o block -> o i block'),),
    neutral=('init_weights',),
  )

  block: int = 8

  def slots(self):
    return {'kernel': peftlab.Slot(dims='in/block out/block block')}

  def apply(self, x, base, p):
    ins, outs = base.shape
    parts = x.reshape(*x.shape[:-1], ins // self.block, self.block)
    y = jnp.einsum('...kj,koji->...oi', parts, self._blocks(p))
    return base(x) + y.reshape(*x.shape[:-1], outs) / ins

  def fuse(self, w, p):
    blocks = jnp.swapaxes(self._blocks(p), 1, 2)  # [in/b, b, out/b, b]
    return w + blocks.reshape(w.shape) / w.shape[0]

  def _blocks(self, p):
    """[in/b, out/b, b (in), b (out)]: number (j, i) is w[(j - i) mod b]."""
    places = jnp.arange(self.block)
    return p.kernel[:, :, (places[:, None] - places[None, :]) % self.block]

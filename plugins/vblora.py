"""VB-LoRA: factors mixed from one bank of vectors (Li et al. 2024, arXiv:2405.15179)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor


def _uniform(key, shape, dtype):
  return jax.random.uniform(key, shape, dtype, -0.02, 0.02)


@peftlab.register_adapter('vblora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class VBLoRA(peftlab.Adapter):
  """y = x W + (x A) B, pieces of A and B mixed from a bank for the whole model.

  Each piece is the sum of the `top` best vectors of the bank, weighted by the softmax of their
  logits. Trainable: rank (in + out) / length x vectors per kernel, and the bank, vectors x length,
  once. Not the identity at the start.

  Attributes:
    rank: of A and B.
    vectors: of the bank.
    length: of a vector; it must divide in and out.
    top: vectors in a mixture.
  """

  identity_at_start = False
  small: ClassVar = {'vectors': 10, 'length': 8}

  peft = PeftForm(
    type='VBLORA',
    keys={
      'rank': Key(name='r', default=4, least=1),
      'vectors': Key(name='num_vectors', default=256, least=1),
      'length': Key(name='vector_length', default=256, least=1),
      'top': Key(name='topk', default=2, least=1),
    },
    tensors=(
      Tensor('a', 'vblora_logits_A', 'rank n vectors -> rank n vectors', on=('linear',)),
      Tensor('b', 'vblora_logits_B', 'm rank vectors -> m rank vectors', on=('linear',)),
    ),
    shared=(Tensor('bank', 'base_model.vblora_vector_bank', 'vectors length -> vectors length'),),
    fixed={'save_only_topk_weights': (False,)},
    neutral=('init_vector_bank_bound', 'init_logits_std'),
    training=('vblora_dropout',),
  )

  rank: int = 4
  vectors: int = 256
  length: int = 256
  top: int = 2

  def __post_init__(self):
    super().__post_init__()
    if not 1 <= self.top <= self.vectors:
      raise ValueError(f'VBLoRA.top is {self.top}; expected 1 to {self.vectors} (vectors).')

  def slots(self):
    normal = jax.nn.initializers.normal(0.1)
    return {
      'a': peftlab.Slot(dims='rank in/length vectors', init=normal),
      'b': peftlab.Slot(dims='out/length rank vectors', init=normal),
      'bank': peftlab.Slot(dims='vectors length', init=_uniform, shared=True),
    }

  def apply(self, x, base, p):
    a, b = self._factors(p)
    return base(x) + (x @ a) @ b

  def fuse(self, w, p):
    a, b = self._factors(p)
    return w + a @ b

  def _factors(self, p):
    a, b = self._mixed(p.a, p.bank), self._mixed(p.b, p.bank)
    return a.reshape(a.shape[0], -1).T, jnp.swapaxes(b, 0, 1).reshape(b.shape[1], -1)

  def _mixed(self, logits, bank):
    best, which = jax.lax.top_k(logits, self.top)
    return (jax.nn.softmax(best)[..., None] * bank[which]).sum(-2)

"""Activated LoRA: LoRA from the tokens on that invoke it (Greenewald et al. 2025, 2504.12397)."""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Key
from peftlab.plugins.lora import FORM, LowRank


@peftlab.register_adapter('alora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class ALoRA(LowRank):
  """y_t = x_t W + m_t s (x_t A) B. Trainable: rank (in + out) per kernel [in, out].

  m_t is 1 for the tokens at and behind the start of the last occurrence of `invocation` in their
  text, else 0; where it does not occur the text is the base's. So keys and values before it are the
  base's, and can be taken from its cache. A text that grows token by token stays invoked.

  Attributes:
    rank: columns of A [in, rank] and rows of B [rank, out].
    alpha: the scale s is alpha / rank, or alpha / sqrt(rank) with rslora.
    rslora: rank-stabilized scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732).
    dropout: rate of dropout on the input of A, in training only.
    invocation: the tokens that invoke it, one at least.
  """

  peft = dataclasses.replace(
    FORM,
    keys={
      **FORM.keys,
      'invocation': Key(name='alora_invocation_tokens', read=tuple, write=list),
    },
    fixed={key: v for key, v in FORM.fixed.items() if key != 'alora_invocation_tokens'},
  )
  mergeable = False
  reads_batch = True
  embeddings = False
  conv = False
  experts = False
  mixed_batch = False
  small: ClassVar[Mapping[str, Any]] = {'invocation': (1,)}

  invocation: tuple[int, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'invocation', tuple(self.invocation))
    if min(self.invocation, default=0) < 0:
      raise ValueError(f'ALoRA invocation is {self.invocation}; expected tokens, 0 and above.')

  def slots(self):
    if not self.invocation:
      raise ValueError('ALoRA invocation is (); expected the tokens that invoke it, one at least.')
    return super().slots()

  def apply(self, x, base, p):
    on = base.batch.after(self.invocation)[:, None]
    change = ((base.dropout(x, self.dropout) @ p.a) * p.scale) @ p.b
    return base(x) + jnp.where(on, change, jnp.zeros((), change.dtype))

  def fuse(self, w, p):
    return peftlab.Adapter.fuse(self, w, p)

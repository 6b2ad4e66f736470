"""Prefix tuning: virtual keys and values in every layer (Li and Liang 2021, arXiv:2101.00190)."""

import dataclasses

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial
from peftlab.formats.peft_rows import RowsForm

INITS = ('normal', 'zero')


@peftlab.register_adapter('prefix')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix(peftlab.Adapter):
  """Attention over [p_k; k] and [p_v; v], the p not turned by rope, the texts `count` further on.

  Trainable: 2 count kv_heads head_dim per layer. With `hidden` (section 4.3) p = tanh(e W1 + b1) W2
  + b2, with e, W1 and b1 once in the model, of width d = kv_heads head_dim: count d + d hidden +
  hidden, and 2 (hidden + 1) d per layer.

  Attributes:
    count: virtual keys, and values.
    hidden: width of the projection; 0: there is none, and the keys and values are trained.
    init: normal (of variance 1) or zero, of the keys and values, or of W2 and b2.
  """

  point = 'prefix'
  identity_at_start = False
  mergeable = False
  mixed_batch = False
  # PEFT keeps of a projection what it gives: such a folder is read as one without, and a prefix
  # that has one is written as ours.
  peft_rows = RowsForm(
    types=('PREFIX_TUNING',),
    keys={'prefix_projection': False, 'encoder_hidden_size': None, 'init_weights': None},
  )

  count: int = 16
  hidden: int = 0
  init: str = initial('normal')

  def __post_init__(self):
    super().__post_init__()
    if self.count < 1 or self.hidden < 0:
      raise ValueError(
        f'Prefix has count {self.count} and hidden {self.hidden}; expected 1 and 0 at least.'
      )
    if self.init not in INITS:
      raise ValueError(f'No prefix init {self.init!r}. Inits: {", ".join(INITS)}.')

  def slots(self):
    normal = jax.nn.initializers.normal(1.0)
    if not self.hidden:
      init = peftlab.zeros if self.init == 'zero' else normal
      return {'rows': peftlab.Slot(dims='count out', init=init)}
    into = jax.nn.initializers.lecun_normal()
    return {
      'embed': peftlab.Slot(dims='count out', init=normal, shared=True),
      'w1': peftlab.Slot(dims='out hidden', init=into, shared=True),
      'b1': peftlab.Slot(dims='hidden', shared=True),
      'w2': peftlab.Slot(dims='hidden out', init=peftlab.zeros if self.init == 'zero' else into),
      'b2': peftlab.Slot(dims='out'),
    }

  def rows(self, p):
    """The virtual keys, or values, [count, out]."""
    if not self.hidden:
      return p.rows
    return jnp.tanh(p.embed @ p.w1 + p.b1) @ p.w2 + p.b2

  def apply(self, x, base, p):
    del base
    return peftlab.before(self.rows(p), x)

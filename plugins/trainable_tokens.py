"""Trainable tokens: a few rows of an embedding are trained."""

import dataclasses

import jax
import jax.numpy as jnp

import peftlab


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Init: rows of the kernel."""

  tokens: tuple[int, ...]

  def __call__(self, key, shape, dtype, weight):
    del key, shape
    return weight[jnp.asarray(self.tokens)].astype(dtype)


@peftlab.register_adapter('trainable_tokens')
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainableTokens(peftlab.Adapter):
  """y = x W', W' = W but for copies of some rows. Trainable: tokens x out per table.

  Attributes:
    tokens: the rows, each once.
  """

  additive = False

  tokens: tuple[int, ...] = (0,)

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'tokens', tuple(self.tokens))
    if not self.tokens or len(set(self.tokens)) < len(self.tokens) or min(self.tokens) < 0:
      raise ValueError(f'TrainableTokens.tokens is {self.tokens}; expected rows, each once.')

  def sizes(self, ins, outs):
    del outs
    if max(self.tokens) >= ins:
      raise ValueError(f'TrainableTokens has the row {max(self.tokens)}; there are {ins}.')
    return {'count': len(self.tokens)}

  def slots(self):
    made = dict(init=_Rows(self.tokens), needs_weight=True)
    return {'rows': peftlab.Slot(dims='count out', **made)}

  def apply(self, x, base, p):
    chosen = x @ jax.nn.one_hot(jnp.asarray(self.tokens), base.shape[0], axis=0, dtype=p.rows.dtype)
    old = base.weight()[jnp.asarray(self.tokens)]
    return base(x) + chosen @ (p.rows - old)

  def fuse(self, w, p):
    return w.at[jnp.asarray(self.tokens)].set(p.rows)

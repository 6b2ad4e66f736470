"""Trainable tokens: a few rows of an embedding are trained."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Beside, Key, PeftForm, Tensor


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Init: rows of the kernel."""

  tokens: tuple[int, ...]

  def __call__(self, key, shape, dtype, weight):
    del key, shape
    return weight[jnp.asarray(self.tokens)].astype(dtype)


def _tokens(given: Any, path: str) -> dict[str, Any] | None:
  """The fields at a layer, of PEFT's trainable_token_indices: rows, or {end of a path: rows}."""
  if isinstance(given, list) and given and isinstance(given[0], dict):
    given = given[0]
  if not isinstance(given, dict):
    return {'tokens': tuple(given)} if path.endswith('embed_tokens') else None
  rows = next((v for k, v in given.items() if path == k or path.endswith(f'.{k}')), None)
  return None if rows is None else {'tokens': tuple(rows)}


@peftlab.register_adapter('trainable_tokens')
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainableTokens(peftlab.Adapter):
  """y = x W', W' = W but for copies of some rows. Trainable: tokens x out per table.

  Attributes:
    tokens: the rows, each once.
  """

  default_where = 'all-embeddings'
  additive = False
  peft = PeftForm(
    type='TRAINABLE_TOKENS',
    keys={'tokens': Key(name='token_indices', read=tuple, write=list)},
    tensors=(Tensor('rows', 'trainable_tokens_delta', 'n out -> n out', on=('embedding',)),),
    neutral=('init_weights',),
    besides=(),
  )
  peft_beside = Beside(
    key='trainable_token_indices',
    tensors=(
      Tensor('rows', 'token_adapter.trainable_tokens_delta', 'n out -> n out', on=('embedding',)),
    ),
    fields=_tokens,
    value=lambda told: {path: list(fields['tokens']) for path, fields in told.items()},
    written=('tokens',),
  )

  tokens: tuple[int, ...] = (0,)

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'tokens', tuple(self.tokens))
    if not self.tokens or len(set(self.tokens)) < len(self.tokens) or min(self.tokens) < 0:
      raise ValueError(f'TrainableTokens.tokens is {self.tokens}; expected rows, each once.')

  def sizes(self, kernel):
    if max(self.tokens) >= kernel['in']:
      raise ValueError(f'TrainableTokens has the row {max(self.tokens)}; there are {kernel["in"]}.')
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

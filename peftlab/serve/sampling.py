"""How a token is chosen from logits: the likeliest, or drawn by temperature, top k, top p."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

_COLDEST, _HOTTEST = 0.01, 100.0

UNKNOWN = -1  # in the place of a token: the logits were not finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How tokens are drawn. The default takes the likeliest, always.

  Attributes:
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: draws from the k likeliest tokens only; 0 from all.
    top_p: draws from the fewest likeliest tokens whose probabilities, after top_k, come to p
      (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751, section 3.1).
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    for name, kind in (('temperature', (int, float)), ('top_k', int), ('top_p', (int, float))):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f'{name} is {value!r:.60}; expected a number.')
    if self.temperature and not _COLDEST <= self.temperature <= _HOTTEST:
      raise ValueError(
        f'temperature is {self.temperature}; it must be 0 (the likeliest token) or between '
        f'{_COLDEST:g} and {_HOTTEST:g}.'
      )
    if not 0 <= self.top_k < 2**31:
      raise ValueError(f'top_k is {self.top_k}; it must be at least 1, or 0 for all tokens.')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p is {self.top_p}; it must be above 0 and at most 1.')
    if not self.temperature and (self.top_k or self.top_p < 1):
      name = 'top_k' if self.top_k else 'top_p'
      raise ValueError(
        f'{name} is {getattr(self, name)} and temperature 0, which takes the likeliest token; '
        f'{name} needs a temperature above 0.'
      )

  @property
  def kind(self) -> str:
    """What is compiled: 'greedy', 'all' or 'some' tokens; the numbers are arguments."""
    if not self.temperature:
      return 'greedy'
    return 'some' if self.top_k or self.top_p < 1 else 'all'

  def numbers(self) -> dict[str, Any]:
    """Temperature, top_k and top_p as the arguments of `choose`."""
    return {
      'temperature': jnp.float32(self.temperature),
      'top_k': jnp.int32(self.top_k),
      'top_p': jnp.float32(self.top_p),
    }


GREEDY = Sampling()


def choose(
  logits: jax.Array, keys: jax.Array, *, kind: str, numbers: dict[str, jax.Array]
) -> jax.Array:
  """A token for every row.

  Args:
    logits: [batch, vocab] float32.
    keys: [batch], a key of its own for every row.
    kind: see `Sampling.kind`.
    numbers: see `Sampling.numbers`.

  Returns:
    [batch] int32.
  """
  if kind == 'greedy':
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  highest = jnp.max(logits, axis=-1, keepdims=True)
  scaled = (logits - highest) / numbers['temperature']
  if kind == 'all':
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
  tokens = jnp.argsort(-scaled, axis=-1)
  scaled = jnp.take_along_axis(scaled, tokens, axis=-1)
  kept = likeliest(scaled, top_k=numbers['top_k'], top_p=numbers['top_p'])
  places = jax.vmap(jax.random.categorical)(keys, jnp.where(kept, scaled, -jnp.inf))
  return jnp.take_along_axis(tokens, places[:, None], axis=-1)[:, 0].astype(jnp.int32)


def likeliest(logits: jax.Array, *, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
  """Which tokens top_k and top_p leave: bool [batch, vocab], never none of a row.

  Args:
    logits: [batch, vocab], each row falling.
    top_k: [] how many are kept; 0: all.
    top_p: [] what their probabilities, among those that top_k keeps, come to.
  """
  vocab = logits.shape[-1]
  first = jnp.arange(vocab)[None, :] < jnp.where(top_k == 0, vocab, top_k)
  probabilities = jax.nn.softmax(jnp.where(first, logits, -jnp.inf), axis=-1)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  return first & (before < top_p)

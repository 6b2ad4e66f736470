"""What a decoder is called with, where the numbers are there to look at: outside of a trace."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from peftlab.models.config import DecoderConfig


def check(
  config: DecoderConfig,
  tokens: Any,
  positions: Any = None,
  *,
  cache: tuple[int, int] | None = None,
) -> None:
  """Raises ValueError for a token or a position that a decoder does not have.

  Under a trace only the length can be told; a token outside the vocabulary then gives NaN.

  Args:
    config: of the decoder.
    tokens: [batch, length] int.
    positions: [batch or 1, length] int, or None: 0, 1, 2, ...
    cache: (batch, length) of its caches, or None.
  """
  low, high = _ends(tokens)
  if low < 0 or high >= config.vocab:
    raise ValueError(
      f'tokens have {low if low < 0 else high}; the vocabulary of the model is 0 to '
      f'{config.vocab - 1}.'
    )
  if positions is None:
    if tokens.shape[1] > config.max_length:
      raise ValueError(
        f'tokens have length {tokens.shape[1]}; the max_length of the model is {config.max_length}.'
      )
    return
  # -1 stands for no token, which only a cache knows.
  first, last = (0, config.max_length) if cache is None else (-1, cache[1])
  low, high = _ends(positions)
  if low < first or high >= last:
    where = 'the model' if cache is None else 'the cache'
    raise ValueError(
      f'positions have {low if low < first else high}; those of {where} are {first} to {last - 1}.'
    )


def _ends(numbers: Any) -> tuple[int, int]:
  """(the least, the greatest) of an array; (0, 0) where they cannot be looked at here."""
  if isinstance(numbers, jax.core.Tracer | jax.ShapeDtypeStruct):
    return 0, 0
  if isinstance(numbers, jax.Array) and not numbers.is_fully_addressable:
    return 0, 0
  held = np.asarray(numbers)
  return int(held.min()), int(held.max())

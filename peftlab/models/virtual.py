"""Virtual tokens: rows that adapters put before the embedded tokens of a decoder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from peftlab._batch import NOWHERE, Batch
from peftlab.models.config import DecoderConfig


def behind(positions: jax.Array, count: int) -> jax.Array:
  """Positions of tokens that stand behind `count` virtual ones; negative ones stay: no token."""
  return jnp.where(positions < 0, positions, positions + count)


def with_virtual(positions: jax.Array, count: int) -> jax.Array:
  """Positions [batch or 1, count + length] of virtual tokens and of those behind them."""
  first = jnp.broadcast_to(jnp.arange(count, dtype=positions.dtype), (positions.shape[0], count))
  return jnp.concatenate([first, behind(positions, count)], axis=1)


def batch_of(
  tokens: jax.Array,
  *,
  count: int,
  segment_ids: jax.Array | None = None,
  cached: tuple[jax.Array, jax.Array] | None = None,
) -> Batch:
  """What adapters may ask about a batch.

  Args:
    tokens: [batch, length] of this call.
    count: virtual tokens before them, of this call.
    segment_ids: [batch, length] or None.
    cached: with a cache, every token up to now [batch, cache], and the places of these.
  """
  text, places = tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
  if cached is not None:
    text, places = cached
  places = jnp.broadcast_to(places, tokens.shape)
  places = jnp.pad(places, ((0, 0), (count, 0)), constant_values=NOWHERE)
  return Batch(text, places, segment_ids)


def check_segments(config: DecoderConfig, count: int, segment_ids: Any) -> None:
  """Raises ValueError for packed rows with virtual tokens where a layer cannot tell them apart."""
  delta = any(config.kind(i).mixer == 'delta' for i in range(config.layers))
  if count and segment_ids is not None and delta:
    raise ValueError(
      f'The rows hold several texts (segment_ids) behind {count} virtual tokens, and a layer with '
      'a state would forget these at the start of each text; expected one text per row.'
    )


def check_length(config: DecoderConfig, count: int, length: int) -> None:
  """Raises ValueError where virtual tokens and the text behind them are longer than a context."""
  if count and count + length > config.max_length:
    raise ValueError(
      f'{count} virtual tokens stand before {length} of the text; the max_length of the model is '
      f'{config.max_length}: at most {max(config.max_length - count, 0)} of the text fit.'
    )

"""Codes of 4 bits in memory: int4, or two in a byte, whichever the device reads faster."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _registry
from peftlab.quant import quantizer

HELD = ('auto', 'bytes', 'int4')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nibbles(quantizer.Quantizer):
  """A quantizer whose codes are 0 to 15.

  XLA's CPU backend takes 2 ns to read an int4 and a tenth of that to take a byte apart; a TPU has
  int4 and must otherwise write the decoded kernel to memory. Both can be saved, as uint4 cannot.

  Attributes:
    held: int4, bytes (of a tile the first half in the low bits, as in GGUF), or auto: by the
      platform where the weight lies.
  """

  held: str = 'auto'

  def __post_init__(self):
    super().__post_init__()
    if self.held not in HELD:
      near = _registry.did_you_mean(str(self.held), HELD)
      raise ValueError(
        f'{self.name} has held={self.held!r}{near or "."} Choices: {", ".join(HELD)}.'
      )

  def settled(self, platform: str, tile: int) -> quantizer.Quantizer:
    """See `Quantizer.settled`; an odd tile has no halves."""
    if self.held != 'auto':
      return self
    held = 'bytes' if platform == 'cpu' and tile % 2 == 0 else 'int4'
    return dataclasses.replace(self, held=held)

  def hold(self, codes: jax.Array) -> jax.Array:
    """Codes 0..15 in int8 [tiles, tile, *out] -> as they are held."""
    if self.held != 'bytes':
      # Without the barrier XLA's CPU backend computes the codes in its slow loop over half bytes.
      codes = jax.lax.optimization_barrier(codes)
      return jnp.where(codes < 8, codes, codes - 16).astype(jnp.int4)
    low, high = jnp.split(codes.astype(jnp.uint8), 2, axis=1)
    return low | (high << 4)

  def hold_blocks(self, codes: np.ndarray) -> np.ndarray:
    """`hold` of numpy arrays, uint8 0..15."""
    if self.held != 'bytes':
      signed = codes.astype(np.int8)
      return np.where(signed < 8, signed, signed - 16).astype(jnp.int4)
    low, high = np.split(codes, 2, axis=1)
    return low | (high << 4)

  def unsigned(self, held: jax.Array) -> jax.Array:
    """As they are held -> codes 0..15 in int32 [tiles, tile, *out]."""
    if held.dtype != jnp.uint8:
      return held.astype(jnp.int32) & 15
    # Shifts along a new dimension: two halves that are stacked would take twice as long.
    places = jnp.asarray([0, 4], jnp.int32).reshape(1, 2, *(1,) * (held.ndim - 1))
    halves = (held.astype(jnp.int32)[:, None] >> places) & 15
    return halves.reshape(held.shape[0], -1, *held.shape[2:])

  def numbers(self, held: jax.Array, dtype: Any) -> jax.Array:
    """As they are held -> the codes 0..15 in dtype."""
    return self.unsigned(held).astype(dtype)

  def signed(self, held: jax.Array) -> jax.Array:
    """As they are held -> the codes as two's complement, -8 to 7, in int32."""
    if held.dtype != jnp.uint8:
      return held.astype(jnp.int32)
    return (self.unsigned(held) ^ 8) - 8

  def signed_numbers(self, held: jax.Array, dtype: Any) -> jax.Array:
    """As they are held -> the codes as two's complement, -8 to 7, in dtype."""
    if held.dtype != jnp.uint8:
      return held.astype(dtype)
    return self.signed(held).astype(dtype)

"""int8 and int4: the nearest whole multiple of a scale per tile (per channel: one tile)."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from peftlab.quant import nibbles, quantizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(quantizer.Quantizer):
  """Codes of a number type, times a scale per tile and output.

  Attributes:
    scale_dtype: of the scales: float32, bfloat16, float16.
    codes_dtype: of the codes.
    bound: what the greatest number of a tile is brought to.
  """

  dims: ClassVar[Mapping[str, str]] = {'codes': 'tiles tile out', 'scales': 'tiles out'}
  codes_dtype: ClassVar[str] = ''
  bound: ClassVar[float] = 0.0

  scale_dtype: str = 'float32'

  def __post_init__(self):
    super().__post_init__()
    quantizer.check_scale_dtype(self)

  def encode(self, w: jax.Array) -> quantizer.Arrays:
    """See `Quantizer.encode`."""
    scales = quantizer.scale_of(jnp.abs(w).max(1), self.bound, self.scale_dtype)
    return {'codes': self.nearest(w / scales.astype(jnp.float32)[:, None]), 'scales': scales}

  def nearest(self, w: jax.Array) -> jax.Array:
    """The code nearest to each scaled number."""
    most = jnp.iinfo(self.codes_dtype)
    return jnp.clip(jnp.round(w), most.min, most.max).astype(self.codes_dtype)

  def numbers_of(self, codes: jax.Array, dtype: Any) -> jax.Array:
    """The numbers that codes are, without their scale."""
    return codes.astype(dtype)

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`."""
    return self.numbers_of(arrays['codes'], dtype) * arrays['scales'].astype(dtype)[:, None]

  def factors(self, arrays: quantizer.Arrays, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """See `Quantizer.factors`: a scale per output, unless sums of codes could leave float16."""
    if arrays['codes'].shape[0] > 1 or dtype == jnp.float16:
      return super().factors(arrays, dtype)
    return self.numbers_of(arrays['codes'], dtype), arrays['scales'][0].astype(dtype)

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`."""
    del out
    scale = quantizer.dtype_bits(self.scale_dtype)
    return quantizer.dtype_bits(self.codes_dtype) + scale * quantizer.per_tile(inputs, self.tile)


@quantizer.register('int8')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Scaled):
  """8-bit integers; by default one scale per output channel.

  The greatest number of a tile is brought to 127.5, half a step above the greatest code, as qwix
  does.
  """

  codes_dtype = 'int8'
  bound = 127.5

  tile: int = 0


@quantizer.register('int4')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(nibbles.Nibbles, Scaled):
  """4-bit integers, -8 to 7; the greatest number of a tile is brought to 7.5, as qwix does."""

  codes_dtype = 'int4'
  bound = 7.5

  def nearest(self, w: jax.Array) -> jax.Array:
    """The code nearest to each scaled number."""
    return self.hold(jnp.clip(jnp.round(w), -8, 7).astype(jnp.int8) & 15)

  def numbers_of(self, codes: jax.Array, dtype: Any) -> jax.Array:
    """The numbers that codes are, without their scale."""
    return self.signed_numbers(codes, dtype)

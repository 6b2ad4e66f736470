"""fp8: 8-bit floating point numbers of two kinds, times a scale per tile."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from peftlab.quant import quantizer
from peftlab.quant.integers import Scaled


class _Float8(Scaled):
  """Numbers of a floating point type of 8 bits (https://arxiv.org/abs/2209.05433)."""

  def nearest(self, w: jax.Array) -> jax.Array:
    """The code nearest to each scaled number; none is out of range."""
    most = float(jnp.finfo(self.codes_dtype).max)
    return jnp.clip(w, -most, most).astype(self.codes_dtype)


@quantizer.register('fp8_e4m3')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8E4M3(_Float8):
  """4 bits of exponent, 3 of mantissa, up to 448; by default one scale per output channel."""

  codes_dtype = 'float8_e4m3fn'
  bound = 448.0

  tile: int = 0


@quantizer.register('fp8_e5m2')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float8):
  """5 bits of exponent, 2 of mantissa, up to 57344; by default one scale per output channel."""

  codes_dtype = 'float8_e5m2'
  bound = 57344.0

  tile: int = 0

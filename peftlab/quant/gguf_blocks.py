"""GGUF's own block types, held as they are in the file: q4_0, q4_1, q8_0, q4_k, q6_k."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from peftlab.quant import nibbles, quantizer

# The blocks are described in ggml's ggml-common.h; those of K types are 256 inputs in parts.


def _lay(array: np.ndarray) -> np.ndarray:
  """[out, tiles, n] -> [tiles, n, out]."""
  return np.ascontiguousarray(np.moveaxis(array, 0, -1))


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
  """A float16 of each block -> [tiles, out]."""
  return _lay(np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16))[:, 0]


def _nibbles(bytes_: np.ndarray, run: int) -> np.ndarray:
  """Bytes [out, tiles, n] -> codes 0..15 [tiles, 2n, out]; of each `run` the low halves first."""
  parts = bytes_.reshape(*bytes_.shape[:-1], -1, 1, run)
  both = np.concatenate([parts & 15, parts >> 4], axis=-2)
  return _lay(both.reshape(*bytes_.shape[:-1], -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks32(quantizer.Quantizer):
  """Blocks of 32 inputs."""

  exact_tile = True

  tile: int = 32


@quantizer.register('q4_0')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Q40(Blocks32, nibbles.Nibbles):
  """Q4_0: w = d * (code - 8), d in float16; 4.5 bits per weight."""

  dims: ClassVar[Mapping[str, str]] = {'codes': 'tiles tile out', 'scales': 'tiles out'}
  gguf_kind = 'Q4_0'

  def encode(self, w: jax.Array) -> quantizer.Arrays:
    """See `Quantizer.encode`; as ggml rounds."""
    place = jnp.abs(w).argmax(1, keepdims=True)
    scales = jnp.take_along_axis(w, place, axis=1) / -8
    inverse = jnp.where(scales == 0, jnp.zeros_like(scales), 1 / scales)
    codes = jnp.clip(jnp.trunc(w * inverse + 8.5), 0, 15).astype(jnp.int8)
    return {'codes': self.hold((codes - 8) & 15), 'scales': scales[:, 0].astype(jnp.float16)}

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`."""
    return self.signed_numbers(arrays['codes'], dtype) * arrays['scales'].astype(dtype)[:, None]

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`."""
    del inputs, out
    return 4 + 16 / 32

  def from_blocks(self, blocks: np.ndarray) -> quantizer.Arrays:
    """See `Quantizer.from_blocks`; code - 8 is held, which fills int4."""
    codes = (_nibbles(blocks[..., 2:], 16) - 8) & 15
    return {'codes': self.hold_blocks(codes), 'scales': _half(blocks, 0)}


@quantizer.register('q4_1')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Q41(Blocks32, nibbles.Nibbles):
  """Q4_1: w = d * code + m, both in float16; 5 bits per weight."""

  dims: ClassVar[Mapping[str, str]] = {
    'codes': 'tiles tile out',
    'scales': 'tiles out',
    'least': 'tiles out',
  }
  gguf_kind = 'Q4_1'

  def encode(self, w: jax.Array) -> quantizer.Arrays:
    """See `Quantizer.encode`; as ggml rounds."""
    least = w.min(1)
    scales = (w.max(1) - least) / 15
    inverse = jnp.where(scales == 0, jnp.zeros_like(scales), 1 / scales)
    codes = jnp.clip(jnp.trunc((w - least[:, None]) * inverse[:, None] + 0.5), 0, 15)
    codes = codes.astype(jnp.int8)
    return {
      'codes': self.hold(codes),
      'scales': scales.astype(jnp.float16),
      'least': least.astype(jnp.float16),
    }

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`."""
    scales, least = (arrays[name].astype(dtype)[:, None] for name in ('scales', 'least'))
    return self.numbers(arrays['codes'], dtype) * scales + least

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`."""
    del inputs, out
    return 4 + 32 / 32

  def from_blocks(self, blocks: np.ndarray) -> quantizer.Arrays:
    """See `Quantizer.from_blocks`."""
    codes = _nibbles(blocks[..., 4:], 16)
    return {'codes': self.hold_blocks(codes), 'scales': _half(blocks, 0), 'least': _half(blocks, 2)}


@quantizer.register('q8_0')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Q80(Blocks32):
  """Q8_0: w = d * code, d in float16; 8.5 bits per weight."""

  dims: ClassVar[Mapping[str, str]] = {'codes': 'tiles tile out', 'scales': 'tiles out'}
  gguf_kind = 'Q8_0'

  def encode(self, w: jax.Array) -> quantizer.Arrays:
    """See `Quantizer.encode`; as ggml rounds, halves away from 0."""
    scales = jnp.abs(w).max(1) / 127
    inverse = jnp.where(scales == 0, jnp.zeros_like(scales), 1 / scales)
    scaled = w * inverse[:, None]
    codes = jnp.sign(scaled) * jnp.floor(jnp.abs(scaled) + 0.5)
    return {'codes': codes.astype(jnp.int8), 'scales': scales.astype(jnp.float16)}

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`."""
    return arrays['codes'].astype(dtype) * arrays['scales'].astype(dtype)[:, None]

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`."""
    del inputs, out
    return 8 + 16 / 32

  def from_blocks(self, blocks: np.ndarray) -> quantizer.Arrays:
    """See `Quantizer.from_blocks`."""
    return {'codes': _lay(blocks[..., 2:]).view(np.int8), 'scales': _half(blocks, 0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks256(quantizer.Quantizer):
  """Blocks of 256 inputs with scales of their own for parts of them; only read from files."""

  exact_tile = True

  tile: int = 256

  def encode(self, w: jax.Array) -> quantizer.Arrays:
    """Raises ValueError: how ggml chooses the scales is not published as a rule."""
    del w
    raise ValueError(f'{self.name} is read from GGUF files only; it cannot be made here.')

  def parts(self, factors: jax.Array, size: int) -> jax.Array:
    """A factor per part [tiles, parts, *out] -> per input [tiles, 256, *out]."""
    return jnp.repeat(factors, size, axis=1, total_repeat_length=256)


@quantizer.register('q4_k')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Q4K(Blocks256, nibbles.Nibbles):
  """Q4_K: w = d * s * code - dmin * m, with s and m of 6 bits per 32 inputs; 4.5 bits."""

  dims: ClassVar[Mapping[str, str]] = {
    'codes': 'tiles tile out',
    'part_scales': 'tiles bytes out',
    'scales': 'tiles out',
    'least': 'tiles out',
  }
  gguf_kind = 'Q4_K'

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`; the 12 bytes hold 8 scales and 8 minima of 6 bits."""
    packed = arrays['part_scales'].astype(jnp.int32)
    d, m, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = jnp.concatenate([d & 63, (rest & 15) | ((d >> 2) & 48)], axis=1)
    least = jnp.concatenate([m & 63, (rest >> 4) | ((m >> 2) & 48)], axis=1)
    scale, least = (
      whole.astype(jnp.float32)[:, None] * part.astype(jnp.float32)
      for whole, part in ((arrays['scales'], scale), (arrays['least'], least))
    )
    codes = self.numbers(arrays['codes'], dtype)
    return codes * self.parts(scale.astype(dtype), 32) - self.parts(least.astype(dtype), 32)

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`."""
    del inputs, out
    return 4 + (12 * 8 + 2 * 16) / 256

  def from_blocks(self, blocks: np.ndarray) -> quantizer.Arrays:
    """See `Quantizer.from_blocks`."""
    return {
      'codes': self.hold_blocks(_nibbles(blocks[..., 16:], 32)),
      'part_scales': _lay(blocks[..., 4:16]),
      'scales': _half(blocks, 0),
      'least': _half(blocks, 2),
    }


@quantizer.register('q6_k')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Q6K(Blocks256, nibbles.Nibbles):
  """Q6_K: w = d * s * (code - 32), codes of 6 bits, s of 8 bits per 16 inputs; 6.5625 bits."""

  dims: ClassVar[Mapping[str, str]] = {
    'codes': 'tiles tile out',
    'high': 'tiles bytes out',
    'part_scales': 'tiles parts out',
    'scales': 'tiles out',
  }
  gguf_kind = 'Q6_K'

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`; of each 32 bytes of high bits come 128 codes, 2 bits at a time."""
    high = arrays['high'].astype(jnp.int32)
    tiles, _, *out = high.shape
    high = high.reshape(tiles, 2, 1, 32, *out)
    places = jnp.arange(0, 8, 2, dtype=jnp.int32).reshape(1, 1, 4, 1, *(1,) * len(out))
    high = ((high >> places) & 3).reshape(tiles, 256, *out)
    codes = (self.unsigned(arrays['codes']) | (high << 4)) - 32
    scale = arrays['scales'].astype(jnp.float32)[:, None] * arrays['part_scales'].astype(
      jnp.float32
    )
    return codes.astype(dtype) * self.parts(scale.astype(dtype), 16)

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`."""
    del inputs, out
    return 6 + (16 * 8 + 16) / 256

  def from_blocks(self, blocks: np.ndarray) -> quantizer.Arrays:
    """See `Quantizer.from_blocks`."""
    return {
      'codes': self.hold_blocks(_nibbles(blocks[..., :128], 64)),
      'high': _lay(blocks[..., 128:192]),
      'part_scales': _lay(blocks[..., 192:208]).view(np.int8),
      'scales': _half(blocks, 208),
    }

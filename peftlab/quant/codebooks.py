"""Codes of 4 bits that stand for 16 numbers of a table: nf4 and mxfp4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from peftlab.quant import nibbles, quantizer

# The 16 values of NormalFloat, QLoRA (https://arxiv.org/abs/2305.14314), appendix E.
NORMAL_FLOAT = (
  -1.0,
  -0.6961928009986877,
  -0.5250730514526367,
  -0.39491748809814453,
  -0.28444138169288635,
  -0.18477343022823334,
  -0.09105003625154495,
  0.0,
  0.07958029955625534,
  0.16093020141124725,
  0.24611230194568634,
  0.33791524171829224,
  0.44070982933044434,
  0.5626170039176941,
  0.7229568362236023,
  1.0,
)
# The magnitudes of e2m1, OCP Microscaling Formats 1.0, section 5.3.3; code 8 and above: negative.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 256


def select(codes: jax.Array, table: Sequence[float], dtype: Any) -> jax.Array:
  """table[codes] for 16 numbers and codes in int32, without a gather.

  A tree of 15 selections on the 4 bits, of 8 where the highest is a sign: arithmetic on vectors,
  which the compiler fuses into the matrix product that reads it. A table gather of the same kernel
  costs a TPU 8 times as much.

  Args:
    codes: of two's complement, -8 to 7, as an int4 is read: its sign is the highest bit for less
      than a mask of it.
    table: by 0..15.
    dtype: of the result.
  """
  signed = all(low == -high for low, high in zip(table[:8], table[8:], strict=True))
  level = [jnp.asarray(value, dtype) for value in (table[:8] if signed else table)]
  for on in (codes & 1 != 0, codes & 2 != 0, codes & 4 != 0, codes < 0)[: 3 if signed else 4]:
    level = [jnp.where(on, level[2 * i + 1], level[2 * i]) for i in range(len(level) // 2)]
  return jnp.where(codes < 0, -level[0], level[0]) if signed else level[0]


def gather(codes: jax.Array, table: Sequence[float], dtype: Any) -> jax.Array:
  """table[codes] for codes 0..15 by reading the table: what a CPU does faster.

  XLA moves the 16 constants of `select` out of a loop over layers as 16 arrays of the size of the
  kernel, which each decoding then reads; a table moved out is still 16 numbers.
  """
  return jnp.asarray(table, dtype).at[codes].get(mode='promise_in_bounds')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codebook(nibbles.Nibbles):
  """A quantizer whose codes stand for numbers of a table."""

  def look_up(self, held: jax.Array, table: Sequence[float], dtype: Any) -> jax.Array:
    """table[codes] for codes as they are held, in the way that was measured to be fast there."""
    tree = functools.partial(select, table=table, dtype=dtype)
    if held.dtype != jnp.uint8:  # int4: not on a CPU, unless asked for
      return tree(self.signed(held))
    read = functools.partial(gather, table=table, dtype=dtype)
    return jax.lax.platform_dependent(
      held,
      cpu=lambda held: read(self.unsigned(held)),
      default=lambda held: tree(self.signed(held)),
    )


@quantizer.register('nf4')
@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalFloat4(Codebook):
  """4-bit NormalFloat of QLoRA (https://arxiv.org/abs/2305.14314): quantiles of the normal.

  With `double` the scales are held as QLoRA's section 3 says: their mean is taken off, and they
  become 8-bit codes in groups of (at most) 256 outputs of one tile, with a float32 scale each.

  Attributes:
    double: whether the scales are quantized, too.
    scale_dtype: of the scales where they are not.
  """

  dims: ClassVar[Mapping[str, str]] = {'codes': 'tiles tile out', 'scales': 'tiles out'}

  double: bool = True
  scale_dtype: str = 'float32'

  def __post_init__(self):
    super().__post_init__()
    quantizer.check_scale_dtype(self)
    if self.double:
      more = {'group_scales': 'tiles groups', 'mean': ''}
      object.__setattr__(self, 'dims', {**type(self).dims, **more})

  def encode(self, w: jax.Array) -> quantizer.Arrays:
    """See `Quantizer.encode`."""
    dtype = 'float32' if self.double else self.scale_dtype
    scales = quantizer.scale_of(jnp.abs(w).max(1), 1.0, dtype)
    w = w / scales.astype(jnp.float32)[:, None]
    middles = (np.asarray(NORMAL_FLOAT[1:]) + np.asarray(NORMAL_FLOAT[:-1])) / 2
    codes = sum((w > np.float32(m)).astype(jnp.int8) for m in middles)
    return {'codes': self.hold(jnp.asarray(codes)), 'scales': scales}

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`."""
    values = self.look_up(arrays['codes'], NORMAL_FLOAT, dtype)
    return values * arrays['scales'].astype(dtype)[:, None]

  def compress(self, arrays: quantizer.Arrays) -> quantizer.Arrays:
    """See `Quantizer.compress`."""
    if not self.double:
      return arrays
    scales = arrays['scales']
    mean = scales.mean()
    size = group_size(scales.shape[1:])
    groups = (scales - mean).reshape(scales.shape[0], -1, size)
    peaks = quantizer.scale_of(jnp.abs(groups).max(-1), 127.0, 'float32')
    codes = jnp.round(groups / peaks[..., None]).astype(jnp.int8).reshape(scales.shape)
    return arrays | {'scales': codes, 'group_scales': peaks, 'mean': mean}

  def expand(self, arrays: quantizer.Arrays) -> quantizer.Arrays:
    """See `Quantizer.expand`."""
    if not self.double:
      return arrays
    codes, peaks = arrays['scales'], arrays['group_scales']
    groups = codes.reshape(*peaks.shape, -1).astype(jnp.float32)
    scales = (groups * peaks[..., None]).reshape(codes.shape) + arrays['mean']
    return {'codes': arrays['codes'], 'scales': scales}

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`; 4.127 for tiles of 64 in groups of 256."""
    scale: float = quantizer.dtype_bits(self.scale_dtype)
    if self.double:
      scale = 8 + 32 / group_size(out)
    mean = 32 / (inputs * quantizer.sizes(out)) if self.double else 0.0
    return 4 + scale * quantizer.per_tile(inputs, self.tile) + mean


def group_size(out: tuple[int, ...]) -> int:
  """Outputs whose scales share one: the greatest divisor of their number up to 256."""
  number = quantizer.sizes(out)
  return next(size for size in range(min(GROUP, number), 0, -1) if number % size == 0)


@quantizer.register('mxfp4')
@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroFloat4(Codebook):
  """Microscaling fp4: e2m1 in blocks of 32 that share a power of 2 (OCP MX 1.0).

  The power is the least that brings the greatest number to 6 or below, as in qwix; the exponent is
  held in 8 bits with a bias of 127 (e8m0): 4.25 bits per weight.
  """

  dims: ClassVar[Mapping[str, str]] = {'codes': 'tiles tile out', 'exponents': 'tiles out'}
  exact_tile = True

  tile: int = 32

  def encode(self, w: jax.Array) -> quantizer.Arrays:
    """See `Quantizer.encode`."""
    scale = quantizer.scale_of(jnp.abs(w).max(1), E2M1[-1], 'float32')
    exponents = jnp.clip(jnp.ceil(jnp.log2(scale)), -127, 127)
    size = jnp.abs(w) * jnp.exp2(-exponents)[:, None]
    # To the nearest; a tie goes to the even mantissa, the even place in the table.
    steps = itertools.pairwise(E2M1)
    over = [size >= (a + b) / 2 if i % 2 else size > (a + b) / 2 for i, (a, b) in enumerate(steps)]
    codes = sum(o.astype(jnp.int8) for o in over) + jnp.where(w < 0, 8, 0).astype(jnp.int8)
    biased = (exponents + 127).astype(jnp.uint8)
    return {'codes': self.hold(codes), 'exponents': biased}

  def decode(self, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
    """See `Quantizer.decode`."""
    table = (*E2M1, *(-value for value in E2M1))
    power = jnp.exp2(arrays['exponents'].astype(jnp.float32) - 127).astype(dtype)
    return self.look_up(arrays['codes'], table, dtype) * power[:, None]

  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """See `Quantizer.bits`."""
    del inputs, out
    return 4 + 8 / 32

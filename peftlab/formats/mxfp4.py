"""MXFP4: four-bit floats with one scale per 32 of them, exactly to float32 and back."""

from __future__ import annotations

import numpy as np

# OCP Microscaling Formats v1.0, section 5.3.3: E2M1, sign in the highest bit.
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_TABLE = np.concatenate([_VALUES, -_VALUES])
_BIAS = 127  # of the scale, E8M0
GROUP = 32


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Codes and scales -> float32, exactly.

  Args:
    blocks: [..., groups, 16] uint8; byte j of a group holds element 2 j in its low four bits.
    scales: [..., groups] uint8, exponents of 2 plus 127.

  Returns:
    [..., groups * 32].
  """
  codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], GROUP)
  exponent = scales.astype(np.int32) - _BIAS
  values = np.ldexp(_TABLE[codes], exponent[..., None])
  return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


def encode(values: np.ndarray, scales: np.ndarray) -> np.ndarray | None:
  """The codes of `values` under given scales: inverse of `decode`.

  Args:
    values: [..., groups * 32] float.
    scales: [..., groups] uint8.

  Returns:
    [..., groups, 16] uint8; None where a value is not exactly one of its group's.
  """
  grouped = np.asarray(values, np.float32).reshape(*scales.shape, GROUP)
  exponent = scales.astype(np.int32) - _BIAS
  scaled = np.ldexp(grouped, -exponent[..., None])
  codes = np.searchsorted(_VALUES, np.abs(scaled)).clip(max=7).astype(np.uint8)
  codes |= np.signbit(scaled).astype(np.uint8) << 3
  if not np.array_equal(_TABLE[codes], scaled):
    return None
  return codes[..., 0::2] | (codes[..., 1::2] << 4)

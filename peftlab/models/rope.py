"""Rotary position embedding: inverse frequencies of a config, and the rotation of heads."""

from __future__ import annotations

import math

from einops import rearrange
import jax
import jax.numpy as jnp
import numpy as np

from peftlab.models.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
  """Radians per token of each rotated pair: float32 [head_dim / 2].

  Args:
    rope: the embedding.
    head_dim: how many dimensions are rotated.
  """
  frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if rope.scaling == 'linear':
    frequencies = frequencies / rope.factor
  elif rope.scaling == 'factors':
    frequencies = frequencies / np.asarray(rope.factors, np.float64)
  elif rope.scaling == 'llama3':
    frequencies = _llama3(frequencies, rope)
  elif rope.scaling == 'yarn':
    frequencies = _yarn(frequencies, rope)
  elif rope.scaling == 'proportional':
    turning = int(rope.fraction * head_dim // 2)
    frequencies = np.where(np.arange(head_dim // 2) < turning, frequencies / rope.factor, 0.0)
  return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
  """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated.

  Llama 3.1 (https://arxiv.org/abs/2407.21783; `apply_scaling` of its reference code).
  """
  turns = rope.original_length * frequencies / (2 * math.pi)  # in the context of pretraining
  kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
  kept = np.clip(kept, 0, 1)
  return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
  """Dimensions that turn often in the original context are kept, the others divided by `factor`.

  YaRN (https://arxiv.org/abs/2309.00071, section 3.2, eq. 17 to 23).
  """
  pairs = len(frequencies)

  def dimension(turns: float) -> float:
    span = math.log(rope.original_length / (turns * 2 * math.pi))
    return pairs * span / math.log(rope.theta)

  low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * pairs - 1)
  stretched = np.clip((np.arange(pairs) - low) / ((high - low) or 0.001), 0, 1)
  return frequencies * (1 - stretched + stretched / rope.factor)


def angles(
  positions: jax.Array, frequencies: jax.Array, amplitude: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """Cosine and sine, float32 [batch or 1, length, 1, pairs], of positions [.., length].

  Args:
    positions: of the tokens.
    frequencies: [pairs], of `inverse_frequencies`.
    amplitude: both are multiplied by it.
  """
  turned = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
  if amplitude == 1:
    return jnp.cos(turned), jnp.sin(turned)
  return amplitude * jnp.cos(turned), amplitude * jnp.sin(turned)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str) -> jax.Array:
  """x [batch, length, heads, head_dim] rotated by its positions, in float32, returned as x's dtype.

  Args:
    x: queries or keys.
    cos: of `angles`.
    sin: of `angles`.
    layout: 'half' rotates dimension i with i + head_dim / 2, 'interleaved' 2 i with 2 i + 1.

  Where cos has fewer than head_dim / 2 pairs, these are the leading dimensions; others pass.
  """
  rotated = 2 * cos.shape[-1]
  if rotated < x.shape[-1]:
    turned = rotate(x[..., :rotated], cos, sin, layout=layout)
    return jnp.concatenate([turned, x[..., rotated:]], axis=-1)
  wide = x.astype(jnp.float32)
  if layout == 'half':
    first, second = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate(_turn(first, second, cos, sin), axis=-1).astype(x.dtype)
  first, second = rearrange(wide, '... (d two) -> two ... d', two=2)
  turned = jnp.stack(_turn(first, second, cos, sin), axis=-1)
  return rearrange(turned, '... d two -> ... (d two)').astype(x.dtype)


def _turn(
  first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return first * cos - second * sin, second * cos + first * sin

"""A fingerprint of a frozen base: the same on every mesh, another if any number of it changed."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _padded, _parts, _processes

SAMPLE = 256


def fingerprint(base: Any) -> str:
  """16 hex digits that tell bases apart.

  SHA-256 over every array's path, shape and dtype, a sample of `SAMPLE` numbers spread evenly over
  it, and the sum of all its numbers' bits, each times its (odd) place, modulo 2^32. The sum is of
  integers, so its order, and with it the mesh, does not matter. One pass over the base, on its
  devices; only the samples and the sums are fetched.

  Args:
    base: a base tree (nested dicts of arrays), see `Parts.base`.
  """
  arrays = {
    f'{_parts.path_name(path)}{jax.tree_util.keystr(inner)}': leaf
    for path, value in _parts.flat(base).items()
    for inner, leaf in jax.tree.leaves_with_path(value, is_leaf=_padded.is_padded)
  }
  arrays = dict(sorted(arrays.items()))
  digest = hashlib.sha256()
  summaries = jax.tree.map(_processes.host, _summaries(list(arrays.values())))
  for name, (sample, total) in zip(arrays, summaries, strict=True):
    array = arrays[name]
    digest.update(f'{name} {tuple(array.shape)} {array.dtype} {int(total)}\n'.encode())
    digest.update(sample.tobytes())
  return digest.hexdigest()[:16]


@jax.jit
def _summaries(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
  return [_summary(_padded.cut(array)) for array in arrays]


def _summary(array: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(bits of a sample [at most SAMPLE], the weighted sum of all bits []), uint32."""
  word = _bits(array)
  places = jnp.zeros(array.shape, jnp.uint32)
  for axis, size in enumerate(array.shape):
    index = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    places = places * np.uint32(size % 2**32) + index
  total = jnp.sum(word * (2 * places + 1), dtype=jnp.uint32)
  chosen = np.unique(np.linspace(0, max(array.size - 1, 0), SAMPLE).astype(np.int64))[: array.size]
  places_of = np.unravel_index(chosen, array.shape or (1,))
  index = tuple(jnp.asarray(place, jnp.int32) for place in places_of)
  return (word if array.ndim else word[None])[index], total


def _bits(array: jax.Array) -> jax.Array:
  """The numbers as uint32: the same bits, or for 4-bit and smaller types the same value."""
  if _parts.is_key(array):
    array = jax.random.key_data(array)
  width = _parts.bits(array.dtype)
  if array.dtype == bool or width < 8:
    return array.astype(jnp.int32).astype(jnp.uint32)
  if width > 32:
    words = jax.lax.bitcast_convert_type(array, jnp.uint32)
    return words[..., 0] ^ words[..., 1]
  return jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{width}')).astype(jnp.uint32)

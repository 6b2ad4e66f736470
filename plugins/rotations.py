"""Rotations by skew matrices, and their product with blocks of features; no adapter type."""

import jax
import jax.numpy as jnp
import numpy as np


def skew(upper: jax.Array, size: int) -> jax.Array:
  """[..., size (size - 1) / 2], an upper triangle row by row -> skew matrices [..., size, size]."""
  rows, columns = np.triu_indices(size, 1)
  whole = jnp.zeros((*upper.shape[:-1], size, size), upper.dtype)
  whole = whole.at[..., rows, columns].set(upper)
  return whole - jnp.swapaxes(whole, -1, -2)


def cayley(q: jax.Array) -> jax.Array:
  """(I - Q) (I + Q)^-1 of skew matrices Q: rotations, in float32."""
  one = jnp.eye(q.shape[-1], dtype=jnp.float32)
  q = q.astype(jnp.float32)
  return jnp.swapaxes(jnp.linalg.solve(one - q, one + q), -1, -2)


def neumann(q: jax.Array, terms: int) -> jax.Array:
  """I + 2Q + 2Q^2 + ... + Q^(terms - 1), near (I + Q) (I - Q)^-1 for small Q, without a solve."""
  q = q.astype(jnp.float32)
  total, power = jnp.eye(q.shape[-1], dtype=jnp.float32), jnp.eye(q.shape[-1], dtype=jnp.float32)
  for term in range(1, terms):
    power = power @ q
    total = total + (power if term == terms - 1 else 2 * power)
  return total


def rotated(x: jax.Array, blocks: jax.Array) -> jax.Array:
  """x [..., n b] times the block-diagonal matrix of blocks [n or 1, b, b]."""
  size = blocks.shape[-1]
  parts = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
  blocks = jnp.broadcast_to(blocks, (parts.shape[-2], size, size)).astype(x.dtype)
  return jnp.einsum('...nb,nbc->...nc', parts, blocks).reshape(x.shape)

"""A delta as a product of two factors: its singular values, and the best one of a rank."""

from __future__ import annotations

import dataclasses

import jax
from jax.experimental import layout
import jax.numpy as jnp
import numpy as np

_LEAST, _MOST = 1e-7, 1e-5  # relative: below it, a singular value is rounding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Svd:
  """delta = u @ diag(s) @ v, u [..., in, n], s [..., n] falling, v [..., n, out]."""

  u: jax.Array
  s: jax.Array
  v: jax.Array


def of_matrix(delta: jax.Array) -> Svd:
  """The decomposition of a matrix [in, out]."""
  # LAPACK reads columns first. XLA would ask whatever made the matrix to write it so, and its FFT
  # on CPU cannot: the matrix is made by rows, then copied.
  rows = layout.with_layout_constraint(delta, layout.Layout(major_to_minor=(0, 1)))
  return Svd(*jnp.linalg.svd(rows, full_matrices=False))


def of_product(a: jax.Array, b: jax.Array) -> Svd:
  """The decomposition of a [in, k] @ b [k, out], which is never made where k is small."""
  if a.shape[1] >= min(a.shape[0], b.shape[1]):
    return of_matrix(a @ b)
  left, upper = jnp.linalg.qr(a)
  right, lower = jnp.linalg.qr(b.T)
  inner = of_matrix(upper @ lower.T)
  return Svd(left @ inner.u, inner.s, inner.v @ right.T)


def factors(svd: Svd, rank: int) -> tuple[jax.Array, jax.Array]:
  """(a [..., in, rank], b [..., rank, out]), the best product; zeros beyond its own rank."""
  root = jnp.sqrt(svd.s[..., :rank])
  a = svd.u[..., :rank] * root[..., None, :]
  b = root[..., :, None] * svd.v[..., :rank, :]
  more = rank - a.shape[-1]
  if more <= 0:
    return a, b
  own = [(0, 0)] * (a.ndim - 2)
  return jnp.pad(a, [*own, (0, 0), (0, more)]), jnp.pad(b, [*own, (0, more), (0, 0)])


def needed(s: np.ndarray, sizes: tuple[int, int]) -> int:
  """The lowest rank that holds the deltas of all layers but for rounding, from s [layers, n]."""
  tolerance = min(max(float(np.finfo(np.float32).eps) * max(sizes), _LEAST), _MOST)
  largest = s.max(axis=-1, keepdims=True, initial=0.0)
  return max(1, int((s > tolerance * largest).sum(axis=-1).max(initial=0)))


def lost(s: np.ndarray, rank: int) -> np.ndarray:
  """||delta - its best of a rank|| and ||delta|| of each layer, [2, layers], from s [layers, n]."""
  squares = s.astype(np.float64) ** 2
  return np.sqrt(np.stack([squares[..., rank:].sum(-1), squares.sum(-1)]))

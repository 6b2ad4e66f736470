"""Weighted merges of deltas, arrays of one shape: linear, magnitude pruning, TIES, DARE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Deltas = Sequence[jax.Array]
VOTES = ('sum', 'count', 'weighted')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """A way to merge deltas.

  Attributes:
    merge: `merge(deltas, weights, density, vote, key) -> delta`.
    density: whether it leaves entries out, so that it needs a share to keep.
    vote: whether it elects signs.
    sums: the result is the weighted sum of the deltas, so factors can be laid side by side.
    doc: one line.
  """

  merge: Callable[..., jax.Array]
  density: bool = False
  vote: bool = False
  sums: bool = False
  doc: str = ''


def linear(deltas: Deltas, weights: Any, *_: Any) -> jax.Array:
  """sum of w delta."""
  return sum((w * d for w, d in zip(weights, deltas, strict=True)), jnp.zeros_like(deltas[0]))


def magnitude(deltas: Deltas, weights: Any, density: float, *_: Any) -> jax.Array:
  """sum of w trimmed(delta): of each delta the largest entries are kept, as they are."""
  return linear([trimmed(d, density) for d in deltas], weights)


def ties(deltas: Deltas, weights: Any, density: float, vote: str = 'sum', *_: Any) -> jax.Array:
  """TIES (Yadav et al. 2023, https://arxiv.org/abs/2306.01708, algorithm 1).

  Trim each delta, elect a sign for each entry, take the mean of w delta over those that have it.
  """
  return agreed([trimmed(d, density) for d in deltas], weights, vote)


def dare(deltas: Deltas, weights: Any, density: float, vote: str, key: jax.Array) -> jax.Array:
  """DARE (Yu et al. 2023, https://arxiv.org/abs/2311.03099, section 3.1), then `linear`."""
  del vote
  return linear(_all_dropped(deltas, density, key), weights)


def dare_ties(deltas: Deltas, weights: Any, density: float, vote: str, key: jax.Array) -> jax.Array:
  """DARE in place of the trimming of TIES."""
  return agreed(_all_dropped(deltas, density, key), weights, vote)


def trimmed(delta: jax.Array, density: float) -> jax.Array:
  """The int(density * size) entries of largest magnitude; zeros elsewhere."""
  count = kept(density, delta.size)
  if count == delta.size:
    return delta
  order = jnp.argsort(-jnp.abs(delta).reshape(-1), stable=True)
  mask = jnp.zeros(delta.size, bool).at[order[:count]].set(True)
  return jnp.where(mask.reshape(delta.shape), delta, jnp.zeros((), delta.dtype))


def kept(density: float, size: int) -> int:
  """How many of `size` entries a density keeps."""
  return int(density * size)


def dropped(delta: jax.Array, density: float, key: jax.Array) -> jax.Array:
  """Entries kept with probability `density` and divided by it: the mean over keys is the delta."""
  if density == 1:
    return delta
  return masked(delta, jax.random.bernoulli(key, density, delta.shape), density)


def masked(delta: jax.Array, keep: jax.Array, density: float) -> jax.Array:
  """The entries that are kept, divided by the share that is."""
  return jnp.where(keep, delta / density, jnp.zeros((), delta.dtype))


def agreed(deltas: Deltas, weights: Any, vote: str) -> jax.Array:
  """The mean of w delta over the deltas whose sign is the elected one.

  Args:
    deltas: trimmed.
    weights: one each.
    vote: elects by the sum of the deltas ('sum', as in the paper; 0 elects +), by the number of
      signs ('count'), or by the sum of w delta ('weighted': a negative weight turns a vote).
  """
  every = jnp.stack(list(deltas))
  scaled = jnp.stack([w * d for w, d in zip(weights, deltas, strict=True)])
  voters = {'sum': every, 'count': jnp.sign(every), 'weighted': scaled}[vote]
  elected = jnp.where(voters.sum(0) >= 0, 1.0, -1.0).astype(every.dtype)
  agree = jnp.sign(scaled if vote == 'weighted' else every) == elected[None]
  total = jnp.where(agree, scaled, jnp.zeros((), every.dtype)).sum(0)
  return total / jnp.maximum(agree.sum(0), 1).astype(every.dtype)


def _all_dropped(deltas: Deltas, density: float, key: jax.Array) -> list[jax.Array]:
  return [dropped(d, density, jax.random.fold_in(key, i)) for i, d in enumerate(deltas)]


METHODS = {
  'linear': Method(merge=linear, sums=True, doc='the sum of w delta, exact'),
  'cat': Method(merge=linear, sums=True, doc='the same, factors side by side: rank is the sum'),
  'svd': Method(merge=linear, sums=True, doc='the same, at the rank that is asked for'),
  'magnitude': Method(merge=magnitude, density=True, doc='the largest entries of each, summed'),
  'ties': Method(merge=ties, density=True, vote=True, doc='the largest, where signs agree'),
  'dare': Method(merge=dare, density=True, doc='random entries of each, rescaled, summed'),
  'dare_ties': Method(merge=dare_ties, density=True, vote=True, doc='random, where signs agree'),
}

"""The weighted merge of what adapters add at one site, one layer of its stack at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _initial, _layer, _sites
from peftlab.fuse import deltas, low_rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """How deltas are merged.

  Attributes:
    method: see `deltas.METHODS`.
    density: the share of entries that is kept, or None.
    vote: see `deltas.agreed`.
    aside: factors are laid side by side, as they are.
  """

  method: deltas.Method
  density: float | None = None
  vote: str = 'sum'
  aside: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge:
  """The merged change of a site; all arrays [layers, ...] float32.

  Attributes:
    site: the site.
    pair: (a [layers, in, k], b [layers, k, out]) where factors were laid side by side, else None.
    svd: else the decomposition of the merged delta.
    bias: the merged change of the bias [layers, out], or None.
  """

  site: _sites.Site
  pair: tuple[jax.Array, jax.Array] | None
  svd: low_rank.Svd | None
  bias: jax.Array | None

  def needed(self) -> int:
    """The lowest rank that holds the change."""
    if self.svd is None:
      assert self.pair is not None
      return self.pair[0].shape[-1]
    sizes = self.site.sizes
    return low_rank.needed(np.asarray(self.svd.s), (sizes['in'], sizes['out']))

  def factors(self, rank: int) -> tuple[jax.Array, jax.Array]:
    """(a [layers, in, rank], b [layers, rank, out]) nearest to it."""
    if self.svd is None:
      assert self.pair is not None
      return self.pair
    return low_rank.factors(self.svd, rank)

  def lost(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(||what a rank leaves out||, ||the whole||) of each layer."""
    if self.svd is None:
      size = _norms(*self.pair) if self.pair else np.zeros(0)
      return np.zeros_like(size), size
    lost, size = low_rank.lost(np.asarray(self.svd.s), rank)
    return lost, size


def _norms(a: jax.Array, b: jax.Array) -> np.ndarray:
  """||a b|| of each layer, from the Gram matrices."""
  left, right = (np.asarray(m, np.float64) for m in (a, b))
  squares = ((np.swapaxes(left, -1, -2) @ left) * (right @ np.swapaxes(right, -1, -2))).sum(
    (-1, -2)
  )
  return np.sqrt(np.maximum(squares, 0.0))


def merge(
  site: _sites.Site,
  attached: Sequence[_layer.Attached],
  weights: Sequence[float],
  *,
  rule: Rule,
  key: jax.Array,
) -> Merge:
  """The weighted merge of the adapters at a site, one weight each.

  Args:
    site: where.
    attached: the adapters there.
    weights: one each.
    rule: how.
    key: of the whole model; what is random differs by site and layer, not by layout.
  """
  # Where some adapter tells experts apart, so does the merge.
  site = dataclasses.replace(site, one=site.experts and all(one.one for one in attached))
  given = [_arrays(site, one) for one in attached]
  layers = site.own_layers
  index = np.array(list(np.ndindex(*layers)), np.uint32).reshape(math.prod(layers), len(layers))
  sizes = site.sizes['in'], site.sizes['out']
  run = _program(tuple(one.adapter for one in attached), sizes, rule)
  pair, svd, bias = run(
    [each for each, _ in given],
    [shared for _, shared in given],
    jnp.asarray(weights, jnp.float32),
    _initial.site_key(key, site),
    jnp.asarray(index),
  )
  return Merge(site=site, pair=pair, svd=svd, bias=bias)


def _arrays(
  site: _sites.Site, attached: _layer.Attached
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """({slot: [layers, *own]}, {slot: the site's part of a shared array})."""
  each, shared = {}, {}
  here = site.under(attached)
  for name, slot in attached.slots().items():
    array = getattr(attached, name)[...]
    shape = _adapter.slot_shape(slot, attached.adapter, sizes=site.sizes)
    if slot.shared:
      shared[name] = _layer.part_of(array, shape)
    else:
      axes = here.slot_axes(slot)
      array = jnp.moveaxis(array, axes, range(len(axes)))
      if here.one and not site.one:
        array = jnp.expand_dims(array, len(axes))
        array = jnp.broadcast_to(array, (*site.layers, *shape))
      each[name] = array.reshape(-1, *shape)
  return each, shared


@functools.lru_cache(maxsize=256)
def _program(own: tuple[_adapter.Adapter, ...], sizes: tuple[int, int], rule: Rule) -> Any:
  """Every layer of a site, one after the other: one delta is held at a time."""

  def every(each: Any, shared: Any, weights: jax.Array, key: jax.Array, index: jax.Array) -> Any:
    def layer(given: tuple) -> Any:
      numbers, arrays = given
      here = key
      for i in range(numbers.shape[0]):
        here = jax.random.fold_in(here, numbers[i])
      values = [_values({**a, **b}) for a, b in zip(arrays, shared, strict=True)]
      return _one(own, values, list(weights), here, sizes, rule)

    return jax.lax.map(layer, (index, each))

  return jax.jit(every)


def _one(
  own: tuple[_adapter.Adapter, ...],
  values: list[_adapter.Values],
  weights: list[jax.Array],
  key: jax.Array,
  sizes: tuple[int, int],
  rule: Rule,
) -> tuple[Any, Any, Any]:
  """(factors side by side, or the decomposition of the merge, and the change of the bias)."""
  method, options = rule.method, (rule.density, rule.vote)
  found = [a.to_factors(p) for a, p in zip(own, values, strict=True)]
  pairs = [pair for pair in found if pair is not None]
  bias = None
  if any(type(a).fuse_bias is not _adapter.Adapter.fuse_bias for a in own):
    none = jnp.zeros(sizes[1])
    added = [_adapter.fused(a, 'fuse_bias', none, p) for a, p in zip(own, values, strict=True)]
    bias = method.merge(added, weights, *options, jax.random.fold_in(key, 1))
  if method.sums and len(pairs) == len(own):
    a = jnp.concatenate([w * pair[0] for w, pair in zip(weights, pairs, strict=True)], 1)
    b = jnp.concatenate([pair[1] for pair in pairs], 0)
    return ((a, b), None, bias) if rule.aside else (None, low_rank.of_product(a, b), bias)
  none = jnp.zeros(sizes)
  added = [_adapter.fused(a, 'fuse', none, p) for a, p in zip(own, values, strict=True)]
  merged = method.merge(added, weights, *options, jax.random.fold_in(key, 0))
  return None, low_rank.of_matrix(merged), bias


def _values(arrays: Mapping[str, jax.Array]) -> _adapter.Values:
  """In float32, but for integers."""
  floats = {n for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.inexact)}
  return _adapter.Values(
    {n: a.astype(jnp.float32) if n in floats else a for n, a in arrays.items()}
  )

"""Several adapters as one: a weighted merge of what they change, never of their factors."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import numbers
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _attach, _layer, _parts, _plan, _registry, _sites, _stack
from peftlab.fuse import deltas, site_merge
from peftlab.fuse.combined import Combined, Row


def combine(
  model: nnx.Module,
  weights: Mapping[str, float],
  *,
  name: str,
  method: str = 'linear',
  density: float | None = None,
  rank: int | None = None,
  vote: str = 'sum',
  into: type[_adapter.Adapter] | None = None,
  rngs: nnx.Rngs | jax.Array | int = 0,
) -> tuple[nnx.Module, Combined]:
  """A model with one more adapter, the weighted merge of some it has; the one given is untouched.

  What each adapter adds to a kernel (and to a bias) is computed in float32, layer by layer, its
  scale included; the merge of these is what the new adapter adds. It is attached switched off
  (`peftlab.activate(model, name)` switches to it); all other arrays are the very same objects. A
  layer that only some of the adapters have gets what these add.

  Args:
    model: with named adapters.
    weights: {name: weight}; any finite number, as float32 holds it.
    name: of the new adapter.
    method: of `deltas.METHODS`. linear, cat and svd give the weighted sum; magnitude, ties and dare
      leave entries out.
    density: the share of the entries of each delta that is kept, above 0 and at most 1; needed by
      the methods that leave some out.
    rank: of the new adapter; None: the lowest that holds the result, or with cat the sum of the
      ranks. What a lower one loses is in the report.
    vote: how ties elects a sign, see `deltas.agreed`.
    into: the type of the new adapter; None: that of the first one, where it can hold two factors,
      or else the first registered type that can.
    rngs: seed, key or nnx.Rngs of the entries that dare drops.

  Returns:
    The model, and per layer the rank and the error.

  Raises:
    ValueError: no adapters, an unknown one, a taken name, a weight that is not finite, an option
      that the method lacks or does not have, NaN or infinity in an array, or a type whose change
      cannot be weighted. Nothing was computed then.
  """
  rule = _rule(method, density, rank, vote)
  found = _found(model, weights, name)
  weights = {given: float(weight) for given, weight in weights.items()}
  into = _type_of_result(found, into)
  _check_rank(found, rank)
  if rule.aside:
    _check_factors(found)
  key = _stack.root_key(rngs)
  merges = [_merged(site, held, weights, rule=rule, key=key) for site, held in found]
  highest = max(merge.needed() for merge in merges)
  ranks = [merge.needed() if rule.aside else rank or highest for merge in merges]
  model = _parts.merge(_parts.split(model))
  _install(model, [_filled(m, r, into) for m, r in zip(merges, ranks, strict=True)], name)
  rows = tuple(_row(m, r) for m, r in zip(merges, ranks, strict=True))
  return model, Combined(name=name, method=method, weights=dict(weights), rows=rows)


def _row(merge: site_merge.Merge, rank: int) -> Row:
  lost, size = merge.lost(rank)
  return Row(path=merge.site.name, rank=rank, lost=lost, size=size)


def _rule(method: str, density: Any, rank: Any, vote: str) -> site_merge.Rule:
  if method not in deltas.METHODS:
    near = _registry.did_you_mean(method, deltas.METHODS)
    raise ValueError(f'No method {method!r}{near or "."} Methods: {", ".join(deltas.METHODS)}.')
  chosen = deltas.METHODS[method]
  if chosen.density and not (isinstance(density, (int, float)) and 0 < density <= 1):
    raise ValueError(
      f'density is {density!r}; {method} needs the share of entries to keep, above 0 and at most 1.'
    )
  if not chosen.density and density is not None:
    raise ValueError(f'density is {density!r}; {method} leaves nothing out.')
  if vote not in deltas.VOTES:
    near = _registry.did_you_mean(vote, deltas.VOTES)
    raise ValueError(f'No vote {vote!r}{near or "."} Votes: {", ".join(deltas.VOTES)}.')
  if not chosen.vote and vote != 'sum':
    raise ValueError(f'vote is {vote!r}; {method} elects no signs.')
  if method == 'cat' and rank is not None:
    raise ValueError(f'rank is {rank}; with cat it is the sum of the ranks. Use svd to lower it.')
  if method == 'svd' and rank is None:
    raise ValueError('rank is None; svd needs the rank of the result.')
  if rank is not None and (not isinstance(rank, int) or rank < 1):
    raise ValueError(f'rank is {rank!r}; it must be at least 1.')
  return site_merge.Rule(method=chosen, density=density, vote=vote, aside=method == 'cat')


def _found(
  model: nnx.Module, weights: Mapping[str, float], name: str
) -> list[tuple[_sites.Site, dict[str, _layer.Attached]]]:
  """Every site that one of the adapters has, with those it has; all of them checked."""
  if not isinstance(weights, Mapping):
    raise ValueError(f'weights is {weights!r}; expected {{name: weight}}.')
  if not weights:
    raise ValueError('There is no adapter to combine; expected {name: weight}.')
  for given, weight in weights.items():
    _attach.require(model, given)
    if not _is_finite(weight):
      raise ValueError(
        f'The weight of {given!r} is {weight!r}; it must be a number that is finite in float32.'
      )
  if name in _attach.names(model):
    raise ValueError(f'The model already has an adapter named {name!r}; detach it first.')
  _attach.check_name(name)
  found = []
  for site in _sites.sites(model, norms=True, points=True):
    there = {a.name: a for a in getattr(site.layer, 'adapters', ())}
    held = {name: there[name] for name in weights if name in there}
    for attached in held.values():
      check_type(type(attached.adapter), site.name)
      check_finite(attached, site.name)
    if held:
      found.append((site, held))
  return found


def _is_finite(weight: Any) -> bool:
  """Whether it is one number, of Python, numpy or JAX, that float32 holds."""
  if not isinstance(weight, (numbers.Real, jax.Array)) or getattr(weight, 'ndim', 0):
    return False
  return abs(float(weight)) <= float(np.finfo(np.float32).max)


def _merged(
  site: _sites.Site,
  held: Mapping[str, _layer.Attached],
  weights: Mapping[str, float],
  **options: Any,
) -> site_merge.Merge:
  """The merge of a site; a ValueError where it is beyond all numbers of float32."""
  merge = site_merge.merge(site, list(held.values()), [weights[n] for n in held], **options)
  arrays = jax.tree.leaves((merge.pair, merge.svd, merge.bias))
  if not all(bool(jnp.isfinite(array).all()) for array in arrays):
    raise ValueError(
      f'The merge at {site.name} is beyond all numbers of float32; expected smaller weights.'
    )
  return merge


def _check_rank(
  found: list[tuple[_sites.Site, dict[str, _layer.Attached]]], rank: int | None
) -> None:
  """Raises ValueError for a rank that no change at these sites can have."""
  full, name = max((site.full_rank, site.name) for site, _ in found)
  if rank is not None and rank > full:
    raise ValueError(
      f'rank is {rank}; the largest full rank of these layers is {full} ({name}), which holds all.'
    )


def check_type(kind: type[_adapter.Adapter], where: str) -> None:
  """Raises ValueError for a type that has no change of its own to weigh."""
  if not kind.mergeable:
    raise ValueError(
      f'{kind.__name__} cannot be combined ({where}): its change is no kernel, it depends on what '
      'the layer is called with.'
    )
  if not kind.additive:
    raise ValueError(
      f'{kind.__name__} cannot be combined ({where}): its change depends on the weight it adapts, '
      'so a sum of such changes is not one of them. Merge it into the weights (peftlab.fuse.fuse).'
    )


def check_finite(attached: _layer.Attached, where: str) -> None:
  """Raises ValueError where an array of an adapter holds NaN or infinity."""
  for slot in attached.slots():
    array = getattr(attached, slot)[...]
    if jnp.issubdtype(array.dtype, jnp.inexact) and not bool(jnp.isfinite(array).all()):
      raise ValueError(
        f'Adapter {attached.name!r} of {where} holds NaN or infinity in {slot!r}; nothing was '
        'merged.'
      )


def _type_of_result(
  found: list[tuple[_sites.Site, dict[str, _layer.Attached]]],
  into: type[_adapter.Adapter] | None,
) -> type[_adapter.Adapter]:
  """The type of the result."""
  if into is not None:
    if not (isinstance(into, type) and issubclass(into, _adapter.Adapter)):
      raise ValueError(f'into is {into!r}; expected an adapter type.')
    if not _holds_factors(into):
      raise ValueError(f'{into.__name__} cannot hold a change that is given as two factors.')
    return into
  own = [type(a.adapter) for _, held in found for a in held.values()]
  known = [_registry.adapters.get(n) for n in _registry.adapters.names()]
  for kind in (*own, *known):
    if _holds_factors(kind):
      return kind
  raise ValueError('No registered adapter type can hold a change that is given as two factors.')


def _holds_factors(kind: type[_adapter.Adapter]) -> bool:
  inherited: Any = _adapter.Adapter.from_factors
  own: Any = kind.from_factors
  return own.__func__ is not inherited.__func__


def _check_factors(found: list[tuple[_sites.Site, dict[str, _layer.Attached]]]) -> None:
  for site, held in found:
    for attached in held.values():
      kind = type(attached.adapter)
      if kind.to_factors is _adapter.Adapter.to_factors:
        raise ValueError(
          f'{kind.__name__} has no factors that cat could lay side by side ({site.name}); use '
          'linear or svd.'
        )


def _filled(
  merge: site_merge.Merge, rank: int, into: type[_adapter.Adapter]
) -> tuple[_sites.Site, _adapter.Adapter, dict[str, jax.Array]]:
  """The adapter at a site and its slots, [layers, *own]."""
  a, b = merge.factors(rank)
  first = None if merge.bias is None else merge.bias[0]
  adapter, _ = into.from_factors(a[0], b[0], first)
  slots = jax.vmap(lambda a, b, bias: into.from_factors(a, b, bias)[1])(a, b, merge.bias)
  return merge.site, adapter, slots


def _install(
  model: nnx.Module,
  filled: list[tuple[_sites.Site, _adapter.Adapter, dict[str, jax.Array]]],
  name: str,
) -> None:
  """Attaches the new adapter in place, switched off."""
  fresh = {site.path: site for site in _sites.sites(model, norms=True)}
  plans = [
    _plan.plan(dataclasses.replace(fresh[site.path], one=site.one), adapter, name)
    for site, adapter, _ in filled
  ]
  placed = {}
  for plan, (_, _, slots) in zip(plans, filled, strict=True):
    if set(slots) != set(plan.slots):
      kind = type(plan.adapter).__name__
      raise ValueError(
        f'{kind}.from_factors gives slots {sorted(slots)}; expected {sorted(plan.slots)}.'
      )
    placed[plan.site.name] = {n: _placed(plan, n, array) for n, array in slots.items()}
  _attach.install(plans, name, placed, training=False)
  for layer in _attach.adapted(model).values():
    for attached in layer.adapters:
      attached.active = attached.active and attached.name != name


def _placed(plan: _plan.Plan, name: str, array: jax.Array) -> jax.Array:
  """[layers, *own] -> the slot's array, its layer axes where they belong, on its devices."""
  stack, layers = plan.stacks[name], plan.site.own_layers
  whole = array.reshape(*layers, *array.shape[1:])
  whole = jnp.moveaxis(whole, range(len(layers)), stack).astype(plan.slots[name].dtype)
  return jax.device_put(whole, plan.shardings[name])

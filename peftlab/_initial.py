"""First values of adapters: the same for a seed, whatever the mesh, the layout, the name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _adapter, _kernel, _parts, _plan, _sites


def root_key(rngs: nnx.Rngs | jax.Array | int) -> jax.Array:
  if isinstance(rngs, nnx.Rngs):
    return rngs.params()
  if isinstance(rngs, int) and not isinstance(rngs, bool):
    return jax.random.key(rngs)
  if isinstance(rngs, jax.Array) and jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key):
    return rngs
  raise ValueError(f'rngs must be a seed, a jax.random.key or nnx.Rngs, given {rngs!r}.')


def initial_values(
  plans: list[_plan.Plan], adapter: _adapter.Adapter, key: jax.Array
) -> dict[str, dict[str, Any]]:
  """The first values of every slot of every site, made in one compiled function."""
  weights = {p.site.name: p.site.weight.get_raw_value() for p in plans if _needs_weight(p)}
  abstract = any(
    isinstance(x, jax.ShapeDtypeStruct)
    for p in plans
    for x in jax.tree.leaves(p.site.weight.get_raw_value())
  )

  def make(key: jax.Array, weights: dict[str, Any]) -> dict[str, dict[str, jax.Array]]:
    made = {}
    for plan in plans:
      keys = site_keys(key, plan.site)
      made[plan.site.name] = {n: _slot_value(plan, n, keys, weights) for n in plan.slots}
      if adapter.stochastic:
        made[plan.site.name]['rng_key'] = _fold_name(keys, 'dropout')
    return made

  where = {p.site.name: dict(p.shardings) for p in plans}
  if adapter.stochastic:
    for plan in plans:
      where[plan.site.name]['rng_key'] = _replicated(next(iter(plan.shardings.values())))
  if abstract:
    shapes = jax.eval_shape(make, key, weights)
    return jax.tree.map(
      lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, where
    )
  return jax.jit(make, out_shardings=where)(key, weights)


def _replicated(sharding: Any) -> Any:
  return NamedSharding(sharding.mesh, PartitionSpec()) if hasattr(sharding, 'mesh') else sharding


def _needs_weight(plan: _plan.Plan) -> bool:
  return any(slot.needs_weight for slot in plan.slots.values())


def site_keys(key: jax.Array, site: _sites.Site) -> jax.Array:
  """One key per layer: of the words of the path, then of each layer index, stacked or not."""
  key = _fold_name(key, _parts.path_name(tuple(k for k in site.path if isinstance(k, str))))
  for index in (k for k in site.path if not isinstance(k, str)):
    key = jax.random.fold_in(key, index)
  for count in site.layers:
    key = _fold_each(key, count)
  return key


def _fold_each(keys: jax.Array, count: int) -> jax.Array:
  """Keys [...] -> [..., count], one per layer."""
  return _over(keys.ndim + 1, jax.random.fold_in)(
    jnp.repeat(keys[..., None], count, axis=-1),
    jnp.broadcast_to(jnp.arange(count), (*keys.shape, count)),
  )


def _fold_name(keys: jax.Array, name: str) -> jax.Array:
  number = jnp.full(keys.shape, zlib.crc32(name.encode()), jnp.uint32)
  return _over(keys.ndim, jax.random.fold_in)(keys, number)


def _over(dimensions: int, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """`function` of one element, mapped over so many leading dimensions."""
  for _ in range(dimensions):
    function = jax.vmap(function)
  return function


def _slot_value(plan: _plan.Plan, name: str, keys: jax.Array, weights: dict[str, Any]) -> jax.Array:
  slot, site = plan.slots[name], plan.site
  own = tuple(s for i, s in enumerate(plan.shapes[name]) if i not in plan.stacks[name])
  arguments = [_fold_name(keys, name)]
  if slot.needs_weight:
    weight = jnp.moveaxis(weights[site.name], site.stack, range(len(site.stack)))
    arguments.append(weight.astype(jnp.float32))

  def init(key: jax.Array, *weight: jax.Array) -> jax.Array:
    matrices = (_kernel.as_matrix(w, site.layout.words) for w in weight)
    made = slot.init(key, own, slot.dtype, *matrices)
    if made.shape != own:
      raise ValueError(f'Slot {name!r} starts with shape {made.shape}; its dims say {own}.')
    return made.astype(slot.dtype)

  value = _over(len(site.stack), init)(*arguments)
  return jnp.moveaxis(value, range(len(site.stack)), plan.stacks[name])

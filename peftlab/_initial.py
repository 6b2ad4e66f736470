"""First values of adapters: the same for a seed, whatever the mesh, the layout, the name."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _adapter, _kernel, _parts, _plan, _sites


def root_key(rngs: nnx.Rngs | jax.Array | int) -> jax.Array:
  """The key that a seed, a key, or one draw of nnx.Rngs gives."""
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
  """{layer: {slot: array}}, and under 'rng_key' the keys of an adapter that draws.

  Each slot is made by a function compiled once for its shape, so that a second adapter of the same
  type compiles nothing.
  """
  made: dict[str, dict[str, Any]] = {}
  for plan in plans:
    site = plan.site
    here = site_key(key, site)
    made[site.name] = {name: _slot_value(plan, name, here) for name in plan.slots}
    if adapter.stochastic:
      made[site.name]['rng_key'] = dropout_keys(plan, here)
  return made


def site_key(key: jax.Array, site: _sites.Site) -> jax.Array:
  """The key of a site: of the words of its path, then of the numbers in it."""
  key = _fold(key, _parts.path_name(tuple(k for k in site.path if isinstance(k, str))))
  for index in (k for k in site.path if not isinstance(k, str)):
    key = jax.random.fold_in(key, index)
  return key


def dropout_keys(plan: _plan.Plan, key: jax.Array) -> Any:
  """A key per layer of a site for its random numbers."""
  sharding = next(iter(plan.shardings.values()))
  if isinstance(sharding, NamedSharding):
    sharding = NamedSharding(sharding.mesh, PartitionSpec())
  run = _maker(
    'dropout', _keep_key, (), None, plan.site.layers, tuple(range(len(plan.site.layers))), sharding
  )
  return _run(run, plan, sharding, key)


def _slot_value(plan: _plan.Plan, name: str, key: jax.Array) -> Any:
  slot, site = plan.slots[name], plan.site
  own = tuple(s for i, s in enumerate(plan.shapes[name]) if i not in plan.stacks[name])
  form = (name, slot.init, own, slot.dtype, site.layers, plan.stacks[name], plan.shardings[name])
  if not slot.needs_weight:
    return _run(_maker(*form), plan, plan.shardings[name], key)
  run = _maker(*form, words=site.layout.words, stack=site.stack)
  return _run(run, plan, plan.shardings[name], key, site.weight.get_raw_value())


def _run(run: Callable[..., jax.Array], plan: _plan.Plan, sharding: Any, *arguments: Any) -> Any:
  """The value, or its shape where the model is one of shapes."""
  weight = jax.tree.leaves(plan.site.weight.get_raw_value())[0]
  if not isinstance(weight, jax.ShapeDtypeStruct):
    return run(*arguments)
  made = jax.eval_shape(run, *arguments)
  return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding)


@functools.lru_cache(maxsize=512)
def _maker(
  name: str,
  init: _adapter.Init,
  own: tuple[int, ...],
  dtype: Any,
  layers: tuple[int, ...],
  at: tuple[int, ...],
  sharding: Any,
  words: tuple[str, ...] = (),
  stack: tuple[int, ...] = (),
) -> Callable[..., jax.Array]:
  """site key (, weight) -> the array of a slot, layer axes at `at`, each layer from its own key."""

  def one(key: jax.Array, *weight: jax.Array) -> jax.Array:
    made = init(key, own, dtype, *(_kernel.as_matrix(w, words) for w in weight))
    if made.shape != own:
      raise ValueError(f'Slot {name!r} starts with shape {made.shape}; its dims say {own}.')
    return made if dtype is None else made.astype(dtype)

  def every(key: jax.Array, *weight: jax.Array) -> jax.Array:
    for count in layers:
      key = _fold_each(key, count)
    # The name last: a layer of a list has its index in the site's key.
    key = _over(len(layers), lambda k: _fold(k, name))(key)
    front = (jnp.moveaxis(w, stack, range(len(stack))).astype(jnp.float32) for w in weight)
    return jnp.moveaxis(_over(len(layers), one)(key, *front), range(len(layers)), at)

  return jax.jit(every, out_shardings=sharding)


def _keep_key(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  del shape, dtype
  return key


def _fold(key: jax.Array, name: str) -> jax.Array:
  return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _fold_each(keys: jax.Array, count: int) -> jax.Array:
  """Keys [...] -> [..., count], one per layer."""
  return _over(keys.ndim + 1, jax.random.fold_in)(
    jnp.repeat(keys[..., None], count, axis=-1),
    jnp.broadcast_to(jnp.arange(count), (*keys.shape, count)),
  )


def _over(dimensions: int, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """`function` of one element, mapped over so many leading dimensions."""
  for _ in range(dimensions):
    function = jax.vmap(function)
  return function

"""Attach adapters to a model and detach them, without copying or touching the model given."""

from __future__ import annotations

from collections.abc import Generator
import contextlib
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _initial, _layer, _parts, _plan, _registry, _report, _sites


def attach(
  model: nnx.Module,
  adapter: _adapter.Adapter,
  *,
  where: _sites.Patterns = 'all-linear',
  exclude: _sites.Patterns = (),
  rngs: nnx.Rngs | jax.Array | int = 0,
  name: str = 'default',
) -> tuple[nnx.Module, _report.Report]:
  """A model with an adapter at every layer that `where` names; the one given is untouched.

  The new model holds the very arrays of the base (law 1). The adapter's arrays are made on the
  devices of their kernels, with specs derived from the kernels' own; a model of shapes
  (`jax.ShapeDtypeStruct`) gets shapes. The same seed gives the same values whatever the name, the
  mesh, the layout of layers and the other sites.

  Args:
    model: any nnx model.
    adapter: an instance of a registered adapter type.
    where: patterns, see `select`.
    exclude: patterns of layers to leave alone.
    rngs: seed, key, or nnx.Rngs (one draw of its `params` stream).
    name: names the adapter; a layer can carry several.

  Returns:
    The model and the table of what was adapted.

  Raises:
    ValueError: nothing matches, the name is taken, a field does not fit a layer; nothing changed.
  """
  if isinstance(adapter, type):
    raise ValueError(f'attach takes an instance, given the type: write {adapter.__name__}().')
  if not isinstance(adapter, _adapter.Adapter):
    raise ValueError(f'attach takes an Adapter, given {type(adapter).__name__}: {adapter!r}.')
  if not isinstance(name, str) or not re.fullmatch(r'[\w-]+', name):
    raise ValueError(f'The adapter name {name!r} must be made of letters, digits, _ and -.')
  model = _parts.merge(_parts.split(model))
  every = _sites.sites(model)
  chosen = _sites.select(every, where, exclude)
  plans = [_plan.plan(site, adapter, name) for site in chosen]
  arrays = _initial.initial_values(plans, adapter, _initial.root_key(rngs))
  install(plans, adapter, name, arrays)
  return model, _report.Report.of(every, plans, adapter, name)


def install(
  plans: list[_plan.Plan],
  adapter: _adapter.Adapter,
  name: str,
  arrays: dict[str, dict[str, Any]],
) -> None:
  """Gives every planned layer its arrays, {layer: {slot: array}}, in place; checks come first."""
  for plan in plans:
    layer = plan.site.layer
    if not isinstance(layer, _layer.AdaptedLayer) and hasattr(layer, 'adapters'):
      raise ValueError(f'{plan.site.name} has an attribute `adapters` of its own.')
  for plan in plans:
    _put(plan, adapter, name, arrays[plan.site.name])


def _put(plan: _plan.Plan, adapter: _adapter.Adapter, name: str, arrays: dict[str, Any]) -> None:
  layer = plan.site.layer
  variables: dict[str, _parts.AdapterParam] = {}
  for slot_name, slot in plan.slots.items():
    kind = _parts.AdapterParam if slot.trainable else _parts.AdapterConstant
    metadata: dict[str, Any] = {'stack': plan.stacks[slot_name]} if plan.site.stack else {}
    variables[slot_name] = kind(arrays[slot_name], **metadata)
  rng = None
  if adapter.stochastic:
    key = arrays.get('rng_key')
    if key is None:
      key = _initial.dropout_keys(plan, _initial.site_key(jax.random.key(0), plan.site))
    count = _zeros_like(key)
    rng = (nnx.RngKey(key, tag='dropout'), nnx.RngCount(count, tag='dropout'))
  attached = _layer.Attached(adapter, name, variables, rng)
  if isinstance(layer, _layer.AdaptedLayer):
    layer.adapters.append(attached)
  else:
    layer.__class__ = _layer.adapted_class(type(layer))
    layer.adapters = nnx.List([attached])


def _zeros_like(key: Any) -> Any:
  """A count of 0 per key; a shape, where the keys are one."""
  if isinstance(key, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(key.shape, jnp.uint32, sharding=key.sharding)
  return jax.device_put(jnp.zeros(key.shape, jnp.uint32), key.sharding)


def adapted(model: nnx.Module) -> dict[tuple, Any]:
  """Every layer that carries adapters, by path."""
  return {p: n for p, n in nnx.iter_graph(model) if isinstance(n, _layer.AdaptedLayer)}


def names(model: nnx.Module) -> tuple[str, ...]:
  """The names of the adapters of a model, in the order they were attached."""
  found = [a.name for layer in adapted(model).values() for a in layer.adapters]
  return tuple(dict.fromkeys(found))


def require(model: nnx.Module, name: str) -> None:
  """Raises ValueError unless the model has an adapter of that name."""
  if name not in names(model):
    near = _registry.did_you_mean(name, names(model))
    have = ', '.join(names(model)) or 'none'
    raise ValueError(f'The model has no adapter {name!r}{near or "."} Adapters: {have}.')


def detach(model: nnx.Module, name: str | None = None) -> nnx.Module:
  """A model without the adapter of that name (None: without any); the one given is untouched.

  Raises:
    ValueError: the model has no such adapter.
  """
  if name is not None:
    require(model, name)
  model = _parts.merge(_parts.split(model))
  for layer in adapted(model).values():
    left = [a for a in layer.adapters if name is not None and a.name != name]
    if left:
      layer.adapters = nnx.List(left)
    else:
      del layer.adapters
      layer.__class__ = _layer.plain_class(type(layer))
  return model


def activate(model: nnx.Module, *active: str) -> None:
  """Switches adapters in place: those named are on, all others off; none named: the base.

  Raises:
    ValueError: the model has no adapter of that name; nothing is switched.
  """
  for name in active:
    require(model, name)
  for layer in adapted(model).values():
    for attached in layer.adapters:
      attached.active = attached.name in active


@contextlib.contextmanager
def disabled(model: nnx.Module) -> Generator[nnx.Module]:
  """Within the block the model computes exactly what its base does; then as before."""
  every = [a for layer in adapted(model).values() for a in layer.adapters]
  kept = [a.active for a in every]
  try:
    for attached in every:
      attached.active = False
    yield model
  finally:
    for attached, active in zip(every, kept, strict=True):
      attached.active = active

"""Attach adapters to a model and detach them, without copying or touching the model given."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
import contextlib
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import (
  _adapter,
  _initial,
  _layer,
  _linearity,
  _padded,
  _parts,
  _plan,
  _processes,
  _registry,
  _report,
  _sites,
  _stack,
)


def attach(
  model: nnx.Module,
  adapter: _adapter.Adapter | Mapping[str, _adapter.Adapter],
  *,
  where: _sites.Patterns | None = None,
  exclude: _sites.Patterns = (),
  rngs: nnx.Rngs | jax.Array | int = 0,
  name: str = 'default',
  fields: Mapping[str, Mapping[str, Any]] | None = None,
  experts: str | Mapping[str, str] = 'each',
  full: nnx.Module | None = None,
  indivisible: str = 'drop',
) -> tuple[nnx.Module, _report.Report]:
  """A model with an adapter at every layer that `where` names; the one given is untouched.

  The new model holds the very arrays of the base (law 1). The adapter's arrays are made on the
  devices of their kernels, with specs derived from the kernels' own; a model of shapes
  (`jax.ShapeDtypeStruct`) gets shapes. The same seed gives the same values whatever the name, the
  mesh, the layout of layers and the other sites.

  Args:
    model: any nnx model.
    adapter: an instance of a registered adapter type, or {pattern: instance} for layers that get
      different ones; the first pattern that names a layer wins, and `where` is not given.
    where: patterns, see `select`; None: what the type is for, 'all-linear' for most.
    exclude: patterns of layers to leave alone.
    rngs: seed, key, or nnx.Rngs (one draw of its `params` stream).
    name: names the adapter; a layer can carry several.
    fields: {field: {pattern: value}}: other values of a field for some layers, each field on its
      own ({'rank': {'attn.q': 4}, 'alpha': {'mlp': 32.0}}); the first pattern wins.
    experts: whether 'each' expert of a layer has arrays of its own, or all share 'one' set of them;
      or {pattern: word}, the first pattern wins. Types that start from a weight have them for each.
    full: the model as it was before it was quantized, for types that start from what was lost.
    indivisible: where a mesh axis does not divide a dimension of the adapter's arrays: 'drop' does
      not use it there, 'pad' stores the dimension longer in memory, 'error' refuses.

  Returns:
    The model and the table of what was adapted.

  Raises:
    ValueError: nothing matches, the name is taken, a field does not fit a layer; nothing changed.
  """
  _check_model(model, 'attach')
  by_pattern, where = _by_pattern(adapter, where)
  check_name(name)
  pad = _padded.check_indivisible(indivisible) == 'pad'
  model = _parts.merge(_parts.split(model))
  every = _sites.sites(model, norms=any(a.norms for a in by_pattern.values()), points=True)
  fitting = _sites.fitting(model, every, list(by_pattern.values()), where)
  chosen = _sites.with_experts(_sites.select(fitting, where, exclude), experts)
  kinds = _sites.assign(chosen, by_pattern, fields or {})
  held = shared_variables(model, name)
  plans = _plans(chosen, kinds, name, held, pad=pad)
  if indivisible == 'error':
    _padded.refuse([lost for plan in plans for lost in plan.dropped])
  raw = {key: v.get_raw_value() for key, v in held.items()}
  before = _before(plans, full)
  arrays = _initial.initial_values(plans, _stack.root_key(rngs), held=raw, full=before)
  install(plans, name, arrays, held=held)
  return model, _report.Report.of(every, plans, adapter, name)


def _plans(
  chosen: Sequence[_sites.Site],
  kinds: Mapping[tuple, _adapter.Adapter],
  name: str,
  held: Mapping[tuple, _parts.AdapterParam],
  *,
  pad: bool,
) -> list[_plan.Plan]:
  """What each chosen layer gets; warnings say what is odd."""
  _linearity.check(chosen)
  plans = [_plan.plan(site, kinds[site.path], name, pad=pad) for site in chosen]
  plans = _plan.share(plans, {key: v.shape for key, v in held.items()})
  _plan.warn_of_ranks(plans)
  _plan.warn_of_starts(plans)
  return plans


def _before(plans: Sequence[_plan.Plan], full: Any) -> dict[tuple, _sites.Site]:
  """{path: site} of the model as it was before it was quantized, where the plans are."""
  if full is None:
    return {}
  _check_model(full, 'full')
  found = {s.path: s for s in _sites.sites(full, norms=True, points=True)}
  for site in (plan.site for plan in plans):
    if site.path not in found:
      near = _registry.did_you_mean(site.name, [s.name for s in found.values()])
      raise ValueError(
        f'full has no layer {site.name!r}{near or ";"} expected the model as it was before it was '
        'quantized.'
      )
    given, own = (s.weight.get_raw_value().shape for s in (found[site.path], site))
    if given != own:
      raise ValueError(
        f'full has a weight {given} at the layer {site.name}; expected {own}, as the model has it.'
      )
  return found


def check_name(name: Any) -> None:
  """Raises ValueError for what cannot name an adapter."""
  if not isinstance(name, str) or not re.fullmatch(r'[\w-]+', name):
    raise ValueError(f'The adapter name {name!r} must be made of letters, digits, _ and -.')


def _check_model(model: Any, what: str) -> None:
  if not isinstance(model, nnx.Module):
    raise ValueError(f'{what} takes a model (an nnx.Module), given {type(model).__name__}.')


def _by_pattern(
  adapter: Any, where: _sites.Patterns | None
) -> tuple[dict[str, Any], _sites.Patterns]:
  """({pattern: adapter}, where); the pattern of a single adapter is ''."""
  if not isinstance(adapter, Mapping):
    _check_adapter(adapter)
    return {'': adapter}, adapter.where if where is None else where
  if not adapter:
    raise ValueError('attach is given no adapter; expected an adapter or {pattern: adapter}.')
  if where not in (None, 'all-linear'):
    raise ValueError('With {pattern: adapter} the patterns say where; leave out `where`.')
  for one in adapter.values():
    _check_adapter(one)
  return dict(adapter), tuple(adapter)


def _check_adapter(adapter: Any) -> None:
  if isinstance(adapter, type):
    raise ValueError(f'attach takes an instance, given the type: write {adapter.__name__}().')
  if not isinstance(adapter, _adapter.Adapter):
    raise ValueError(f'attach takes an Adapter, given {type(adapter).__name__}: {adapter!r}.')


def shared_variables(model: nnx.Module, name: str) -> dict[tuple, _parts.AdapterParam]:
  """{(adapter, slot): Variable} of the arrays that an adapter of that name shares in a model."""
  every = [a for layer in adapted(model).values() for a in layer.adapters if a.name == name]
  return {(a.adapter, s): getattr(a, s) for a in every for s in _plan.shared(a.slots())}


def install(
  plans: Sequence[_plan.Plan],
  name: str,
  arrays: dict[str, dict[str, Any]],
  *,
  held: Mapping[tuple, _parts.AdapterParam] | None = None,
  training: bool = True,
) -> None:
  """Gives every planned layer its arrays, {layer: {slot: array}}, in place; checks come first.

  A shared array becomes one Variable, that of `held` where the model has it already. With
  `training` False they are in evaluation mode: nothing is dropped.
  """
  for plan in plans:
    layer = plan.site.layer
    if not isinstance(layer, _layer.AdaptedLayer) and hasattr(layer, 'adapters'):
      raise ValueError(f'{plan.site.name} has an attribute `adapters` of its own.')
  shared = dict(held or {})
  for plan in plans:
    attached = _attached(plan, name, arrays[plan.site.name], shared)
    if plan.adapter.stochastic and not training:
      attached.eval()
    _put(plan.site.layer, attached)


def _put(layer: Any, attached: _layer.Attached) -> None:
  if isinstance(layer, _layer.AdaptedLayer):
    layer.adapters.append(attached)
  else:
    layer.__class__ = _layer.adapted_class(type(layer))
    layer.adapters = nnx.List([attached])


def _attached(
  plan: _plan.Plan,
  name: str,
  arrays: dict[str, Any],
  shared: dict[tuple, _parts.AdapterParam],
) -> _layer.Attached:
  adapter = plan.adapter
  variables: dict[str, _parts.AdapterParam] = {}
  for slot_name, slot in plan.slots.items():
    if slot.shared and (adapter, slot_name) in shared:
      variables[slot_name] = shared[adapter, slot_name]
      continue
    kind = _parts.AdapterParam if slot.trainable else _parts.AdapterConstant
    # The axes that count layers; that of the experts belongs to the layer.
    layers = plan.stacks[slot_name][: len(plan.site.stack) - plan.site.experts]
    metadata: dict[str, Any] = {'stack': layers} if layers or slot.shared else {}
    variables[slot_name] = kind(arrays[slot_name], **metadata)
    if slot.shared:
      shared[adapter, slot_name] = variables[slot_name]
  rng = None
  if adapter.stochastic:
    key = arrays.get('rng_key')
    if key is None:
      key = _initial.dropout_keys(plan, _initial.site_key(jax.random.key(0), plan.site))
    count = _zeros_like(key)
    rng = (nnx.RngKey(key, tag='dropout'), nnx.RngCount(count, tag='dropout'))
  return _layer.Attached(adapter, name, variables, rng, one=plan.site.one)


def _zeros_like(key: Any) -> Any:
  """A count of 0 per key; a shape, where the keys are one."""
  if isinstance(key, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(key.shape, jnp.uint32, sharding=key.sharding)
  return _processes.put(jnp.zeros(key.shape, jnp.uint32), key.sharding)


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

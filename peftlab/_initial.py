"""First values of adapters: the same for a seed, whatever the mesh, the layout, the name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any
import zlib

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _adapter, _kernel, _packed, _padded, _parts, _plan, _sites, _stack


def initial_values(
  plans: Sequence[_plan.Plan],
  key: jax.Array,
  *,
  held: Mapping[tuple, Any] | None = None,
  full: Mapping[tuple, _sites.Site] | None = None,
) -> dict[str, dict[str, Any]]:
  """{layer: {slot: array}}, and under 'rng_key' the keys of an adapter that draws.

  Each slot is made by a function compiled once for its shape, so that a second adapter of the same
  type compiles nothing.

  Args:
    plans: of all sites of one name.
    key: random.
    held: {(adapter, slot): array} of shared arrays that the model has already.
    full: {path: site} of the weights as they were before they were quantized.
  """
  made: dict[str, dict[str, Any]] = {}
  shared = dict(held or {})
  for plan in plans:
    site = plan.site
    here = site_key(key, site)
    values = _own_values(plan, here, (full or {}).get(site.path, site))
    for name in _plan.shared(plan.slots):
      if (plan.adapter, name) not in shared:
        shared[plan.adapter, name] = _shared_value(plan, name, key)
      values[name] = shared[plan.adapter, name]
    if plan.adapter.stochastic:
      values['rng_key'] = dropout_keys(plan, here)
    made[site.name] = values
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
  layers = plan.site.own_layers
  form = _Form('dropout', (), None, tuple(range(len(layers))), sharding)
  run = _maker((_One('dropout', _keep_key, ()),), (form,), plan.site.own_numbers)
  return _run(run, plan, (form,), key)['dropout']


@dataclasses.dataclass(frozen=True)
class _Form:
  """How one array is made: its name, shape and dtype for one layer, its layer axes, sharding.

  `stored` is the whole shape in memory of one that is padded.
  """

  name: str
  own: tuple[int, ...]
  dtype: Any
  at: tuple[int, ...]
  sharding: Any
  stored: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _One:
  """The first value of one slot, of the inputs `takes`."""

  name: str
  init: _adapter.Init
  own: tuple[int, ...]
  dtype: Any = None
  takes: tuple[int, ...] = ()

  def __call__(self, key: jax.Array, *weight: jax.Array) -> dict[str, jax.Array]:
    return {self.name: self.init(key, self.own, self.dtype, *weight)}


@dataclasses.dataclass(frozen=True)
class _Start:
  """`Adapter.start`; equal for two adapters only where every field is, `initial` ones too."""

  name: str
  adapter: _adapter.Adapter = dataclasses.field(compare=False)
  told: tuple
  sizes: tuple[int, int]
  takes: tuple[int, ...] = ()

  def __call__(self, key: jax.Array, *weights: jax.Array) -> dict[str, jax.Array]:
    weight, full = weights or (None, None)
    return self.adapter.start(key, self.sizes, weight, full)


def _form(plan: _plan.Plan, name: str) -> _Form:
  own = tuple(s for i, s in enumerate(plan.shapes[name]) if i not in plan.stacks[name])
  dtype, at, stored = plan.slots[name].dtype, plan.stacks[name], plan.stored.get(name)
  return _Form(name, own, dtype, at, plan.shardings[name], stored)


def _own_values(plan: _plan.Plan, key: jax.Array, full: _sites.Site) -> dict[str, Any]:
  """All slots of a site but the shared ones, by one program."""
  own = {n: s for n, s in plan.slots.items() if not s.shared}
  sources = {
    'weight': lambda: _source(plan.site, 'weight'),
    'bias': lambda: _source(plan.site, 'bias'),
    'full': lambda: _source(full, 'weight'),
  }
  joint = [s for s in own.values() if s.init is _adapter.together]
  whole = any(s.needs_weight for s in joint)
  wanted = {s.of for s in own.values() if s.needs_weight} | ({'full'} if whole else set())
  order = [name for name in sources if name in wanted]
  given = [sources[name]() for name in order]
  makes: list[_One | _Start] = []
  for name, slot in own.items():
    if slot.init is not _adapter.together:
      takes = (order.index(slot.of),) if slot.needs_weight else ()
      makes.append(_One(name, slot.init, _form(plan, name).own, slot.dtype, takes))
  if joint:
    takes = (order.index('weight'), order.index('full')) if whole else ()
    makes.append(_start(plan, takes))
  forms = tuple(_form(plan, name) for name in own)
  run = _maker(tuple(makes), forms, plan.site.own_numbers, tuple(how for _, how in given))
  return _run(run, plan, forms, key, *(value for value, _ in given)) if forms else {}


def _start(plan: _plan.Plan, takes: tuple[int, ...]) -> _Start:
  adapter, sizes = plan.adapter, plan.site.sizes
  told = (type(adapter), *(getattr(adapter, f.name) for f in dataclasses.fields(adapter)))
  return _Start('start', adapter, told, (sizes['in'], sizes['out']), takes)


def _shared_value(plan: _plan.Plan, name: str, key: jax.Array) -> Any:
  slot, form = plan.slots[name], _form(plan, name)
  run = _maker((_One(name, slot.init, form.own, slot.dtype),), (form,), ())
  return _run(run, plan, (form,), key)[name]


def _source(site: _sites.Site, of: str) -> tuple[Any, tuple]:
  """(the weight or bias of a site, (words, layer axes, factor) of it)."""
  if of == 'weight':
    return site.weight.get_raw_value(), (site.layout.words, site.stack, site.factor)
  assert site.bias is not None
  value = site.bias.get_raw_value()
  rank = value.ndim - len(site.stack)
  return value, (('out',) * rank, _stack.place_axes(site.stack, rank), 1.0)


def _run(
  run: Callable[..., dict[str, jax.Array]], plan: _plan.Plan, forms: tuple[_Form, ...], *given: Any
) -> dict[str, Any]:
  """The values, or their shapes where the model is one of shapes."""
  weight = jax.tree.leaves(plan.site.weight.get_raw_value())[0]
  abstract = isinstance(weight, jax.ShapeDtypeStruct)
  try:
    with _adapter.noted(plan.adapter, 'its first values', f'layer {plan.site.name}'):
      made = jax.eval_shape(run, *given) if abstract else run(*given)
  except _MisfitError as error:
    kind = type(plan.adapter).__name__
    raise ValueError(f'{kind} (layer {plan.site.name}): {error}') from None
  if abstract:
    shapes = made
    made = {
      f.name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=f.sharding)
      for f in forms
      for s in [shapes[f.name]]
    }
  padded = {f.name: _padded.Padded(made[f.name], f.own) for f in forms if f.stored}
  return {**made, **padded}


@functools.lru_cache(maxsize=512)
def _maker(
  makes: tuple[_One | _Start, ...],
  forms: tuple[_Form, ...],
  numbers: tuple[tuple[int, ...], ...],
  weights: tuple[tuple[tuple[str, ...], tuple[int, ...], float], ...] = (),
) -> Callable[..., dict[str, jax.Array]]:
  """site key (, weights) -> {slot: array}, layer axes where the forms say, a key for each layer.

  Layers are told apart by their `numbers`, per stack axis.
  """
  layers = len(numbers)

  def one(key: jax.Array, *weight: jax.Array) -> dict[str, jax.Array]:
    matrices = [
      _times(factor, _kernel.as_matrix(w, words) if 'in' in words else w.reshape(-1))
      for w, (words, _, factor) in zip(weight, weights, strict=True)
    ]
    made = {}
    for make in makes:
      # The name last: a layer of a list has its index in the site's key.
      made |= make(_fold(key, make.name), *(matrices[i] for i in make.takes))
    return _checked(made, forms)

  def every(key: jax.Array, *weight: jax.Array) -> dict[str, jax.Array]:
    for own in numbers:
      key = _fold_each(key, own)
    front = (_front(w, stack) for w, (_, stack, _) in zip(weight, weights, strict=True))
    made = _over(layers, one)(key, *front)
    moved = {f.name: jnp.moveaxis(made[f.name], range(layers), f.at) for f in forms}
    return {f.name: _padded.widened(a, f.stored or a.shape) for f in forms for a in [moved[f.name]]}

  return jax.jit(every, out_shardings={f.name: f.sharding for f in forms})


def _front(weight: Any, stack: tuple[int, ...]) -> Any:
  """A weight with its layer axes first; one of codes and scales has them there."""
  if isinstance(weight, _packed.Packed):
    return weight
  weight = _padded.cut(weight)
  return jnp.moveaxis(weight, stack, range(len(stack))).astype(jnp.float32)


def _times(factor: float, matrix: jax.Array) -> jax.Array:
  return matrix if factor == 1.0 else matrix * factor


class _MisfitError(ValueError):
  """A first value that does not fit its slot; the program that makes it knows no layer."""


def _checked(made: dict[str, jax.Array], forms: tuple[_Form, ...]) -> dict[str, jax.Array]:
  for form in forms:
    if form.name not in made:
      raise _MisfitError(f'start gives no value for the slot {form.name!r}.')
    value = made[form.name]
    if not hasattr(value, 'shape'):
      raise _MisfitError(f'Slot {form.name!r} starts as {type(value).__name__}; expected an array.')
    if value.shape != form.own:
      raise _MisfitError(
        f'Slot {form.name!r} starts with shape {value.shape}; its dims say {form.own}.'
      )
  return {f.name: made[f.name] if f.dtype is None else made[f.name].astype(f.dtype) for f in forms}


def _keep_key(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  del shape, dtype
  return key


def _fold(key: jax.Array, name: str) -> jax.Array:
  return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _fold_each(keys: jax.Array, numbers: tuple[int, ...]) -> jax.Array:
  """Keys [...] -> [..., layers], one per layer number."""
  count = len(numbers)
  return _over(keys.ndim + 1, jax.random.fold_in)(
    jnp.repeat(keys[..., None], count, axis=-1),
    jnp.broadcast_to(jnp.asarray(numbers, jnp.int32), (*keys.shape, count)),
  )


def _over(dimensions: int, function: Callable[..., Any]) -> Callable[..., Any]:
  """`function` of one element, mapped over so many leading dimensions."""
  for _ in range(dimensions):
    function = jax.vmap(function)
  return function

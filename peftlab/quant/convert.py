"""Quantizes the kernels of a model, and undoes it; the model given is untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from peftlab import _packed, _padded, _parts, _sites, _specs, _stack
from peftlab.quant import encoding, layer, quantized, quantizer, report, tiles


@dataclasses.dataclass(frozen=True)
class Plan:
  """One weight to quantize.

  Attributes:
    site: the layer.
    form: what its weight becomes.
    asked: the tile asked for.
    entries: of the weight's spec, stack axes first; None where it is on no mesh.
    mesh: the mesh, or None.
    indivisible: what is done where a mesh axis does not divide an array, see `quantize`.
    value: what it becomes, where that is at hand; None: it is encoded.
  """

  site: _sites.Site
  form: quantized.Form
  asked: int
  entries: tuple | None
  mesh: Any
  indivisible: str = 'drop'
  value: quantized.Quantized | None = None

  def arrays(self) -> tuple[Mapping[str, Any] | None, list[_specs.Dropped]]:
    """Where the arrays go, see `encoding.fitted` (None: on no mesh), and the axes dropped."""
    if self.mesh is None:
      return None, []
    assert self.entries is not None
    pad = self.indivisible == 'pad'
    placed, lost = encoding.fitted(self.form, self.site.layers, self.entries, self.mesh, pad=pad)
    path = _parts.path_name((*self.site.path, self.site.kind.weight))
    return placed, [dataclasses.replace(d, path=f'{path}.{d.path}') for d in lost]


def quantize(
  model: nnx.Module,
  given: str | quantizer.Quantizer = 'nf4',
  *,
  where: _sites.Patterns = 'all-linear',
  exclude: _sites.Patterns = (),
  tile: tiles.Tile = None,
  indivisible: str = 'drop',
) -> tuple[nnx.Module, report.QuantReport]:
  """A model whose chosen weights are held as codes and scales; every other array is shared.

  The quantized weight is a value of the same Variable at the same path: base, shared by all
  adapters, sharded array by array, saved, never trained. Layers of any registered type can be
  quantized, with or without adapters on them; a model of shapes gets shapes.

  Args:
    model: any nnx model.
    given: a registered name ('nf4', 'int8'), perhaps with options ('nf4(double=false)'), or an
      instance.
    where: patterns, see `attach`; embeddings and heads are left alone unless they are named.
    exclude: patterns of layers to leave alone.
    tile: inputs that share a scale; 0: all of them; 'auto': the largest, at most the quantizer's
      own, that gives every shard of the inputs whole tiles; None: the quantizer's own.
    indivisible: where a mesh axis does not divide a dimension of an array: 'drop' does not use it
      there, 'pad' stores the dimension longer, 'error' refuses.

  Returns:
    The model, and the table of what was quantized.

  Raises:
    ValueError: no such quantizer, nothing matches, a weight is quantized already, a tile does not
      divide the inputs, a weight holds NaN or infinity, or an axis does not divide an array and
      that is an error; nothing was changed.
  """
  options: dict[str, Any] = {'where': where, 'exclude': exclude, 'tile': tile}
  plans = plan(model, given, indivisible=indivisible, **options)
  if indivisible == 'error':
    _padded.refuse([lost for one in plans for lost in one.arrays()[1]])
  return carry_out(model, plans)


def carry_out(model: nnx.Module, plans: Sequence[Plan]) -> tuple[nnx.Module, report.QuantReport]:
  """A model with some plans done; the one that they were made for is untouched."""
  rows, dropped, made = [], [], {}
  for one in plans:
    key = id(one.site.weight)
    if key not in made:
      value, lost = _encoded(one)
      made[key] = (one, value)
      dropped += lost
      rows.append(report.row(one.site.name, value, asked=one.asked))
  copy = _parts.merge(_parts.split(model))
  where = {p.site.path: made[id(p.site.weight)] for p in plans}
  _install(copy, where)
  return copy, report.QuantReport(tuple(rows), tuple(dropped))


def plan(
  model: nnx.Module,
  given: str | quantizer.Quantizer | Callable[[_sites.Site], quantizer.Quantizer | None],
  *,
  where: _sites.Patterns = 'all-linear',
  exclude: _sites.Patterns = (),
  tile: tiles.Tile = None,
  indivisible: str = 'drop',
) -> list[Plan]:
  """What `quantize` will do to a model, all of it checked.

  Args and errors: see `quantize`; `given` may be a function of the layer (None: leave it alone).
  """
  sites = _sites.select(_sites.sites(model), where, exclude)
  if callable(given):
    pairs = [(site, given(site)) for site in sites]
  else:
    pairs = [(site, quantizer.get_quantizer(given)) for site in sites]
  _padded.check_indivisible(indivisible)
  made = [plan_site(site, chosen, tile) for site, chosen in pairs if chosen is not None]
  return [dataclasses.replace(one, indivisible=indivisible) for one in made]


def plan_site(site: _sites.Site, chosen: quantizer.Quantizer, tile: tiles.Tile) -> Plan:
  """What becomes of the weight of one layer, checked; errors: see `quantize`."""
  value: Any = site.weight.get_raw_value()
  if isinstance(value, _packed.Packed):
    raise ValueError(f'{site.name} is quantized already.')
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise ValueError(f'{site.name} has a weight of {value.dtype}; expected floating point.')
  tiled = 'in' if site.kind.linear else 'out'
  form = quantized.Form(
    quantizer=chosen,
    words=site.layout.words,
    shape=site.shape,
    dtype=str(value.dtype),
    tiled=tiled,
    name=f'{site.name}.{site.kind.weight}',
  )
  placed: Any = getattr(value, 'sharding', None)
  mesh: Any = placed.mesh if isinstance(placed, NamedSharding) else None
  entries = None if mesh is None else _entries(placed.spec, value.ndim, site.stack)
  shards = 1
  if entries is not None:
    first = _specs.entry_axes(entries[len(site.stack) + form.order[0]])
    shards = math.prod(mesh.shape[axis] for axis in first)
  settled = tiles.settle(
    chosen,
    tile,
    inputs=form.inputs,
    shards=shards,
    name=form.name,
    dimension=f"the dimension '{tiled}'",
  )
  settled = settled.settled(_platform(placed), settled.tile or form.inputs)
  asked = settled.tile if tile != tiles.AUTO else chosen.tile
  return Plan(site, dataclasses.replace(form, quantizer=settled), asked, entries, mesh)


def _platform(placed: Any) -> str:
  """Of the devices of a sharding; of this process where there is none."""
  devices = getattr(placed, 'device_set', None)
  return next(iter(devices)).platform if devices else jax.default_backend()


def _entries(spec: Any, rank: int, stack: tuple[int, ...]) -> tuple:
  """A spec's entries, one per dimension, the stack axes first."""
  full = (*spec.partitions, *(None,) * (rank - len(spec.partitions)))
  own = [i for i in range(rank) if i not in stack]
  return tuple(full[i] for i in (*stack, *own))


def _encoded(one: Plan) -> tuple[quantized.Quantized, list[_specs.Dropped]]:
  if one.value is not None:
    return one.value, []
  site, form = one.site, one.form
  value: Any = _padded.cut(site.weight.get_raw_value())
  placed, dropped = one.arrays()
  if isinstance(value, jax.ShapeDtypeStruct):
    made: Mapping[str, Any] = placed or encoding.shapes(form, site.layers)
  else:
    if site.stack != tuple(range(len(site.stack))):
      value = jnp.moveaxis(value, site.stack, range(len(site.stack)))
    made = encoding.encode(form, value, placed)
  return quantized.Quantized(dict(made), form), dropped


def _install(model: nnx.Module, made: Mapping[tuple, tuple[Plan, quantized.Quantized]]) -> None:
  """Puts quantized weights in the place of weights, {path of the layer: ...}; in place."""
  sites = _sites.sites(model)
  done = {id(s.weight): made[s.path] for s in sites if s.path in made}
  for site in sites:
    if id(site.weight) in done:  # also a layer that shares the weight of one that was chosen
      site.layer.__class__ = layer.quantized_class(type(site.layer))
  for site in sites:
    if site.path in made and not isinstance(site.weight.get_raw_value(), _packed.Packed):
      one, value = made[site.path]
      put(site.weight, value, stack=one.site.stack)


def put(variable: nnx.Variable, value: quantized.Quantized, *, stack: tuple[int, ...]) -> None:
  """Gives a Variable a quantized weight; its metadata then has the stack axes first."""
  rank = len(value.form.shape) + len(stack)
  order = (*stack, *(i for i in range(rank) if i not in stack))
  for key in _stack.NAMED_DIMENSIONS:
    names = variable.get_metadata().get(key)
    if isinstance(names, (tuple, list)) and len(names) == rank:
      variable.set_metadata(key, tuple(names[i] for i in order))
  if stack:
    variable.set_metadata('stack', tuple(range(len(stack))))
  variable.set_raw_value(value)


def dequantize(model: nnx.Module) -> nnx.Module:
  """A model with every quantized weight in numbers again, of the dtype that it had.

  Decoded in float32 and rounded once; every other array is shared, the model given untouched.
  """
  model = _parts.merge(_parts.split(model))
  for site in _sites.sites(model):
    value: Any = site.weight.get_raw_value()
    if isinstance(value, _packed.Packed):
      site.weight.set_raw_value(value.dense())
  for _, node in nnx.iter_graph(model):
    if isinstance(node, nnx.Module):
      plain = layer.dense_class(type(node))
      if plain is not type(node):
        node.__class__ = plain
  return model


def error(weight: jax.Array, value: quantized.Quantized) -> float:
  """||decoded - weight|| / ||weight||, root mean square over all layers, layer by layer."""
  count = len(value.stack)

  def one(pair: tuple[jax.Array, quantized.Quantized]) -> tuple[jax.Array, jax.Array]:
    exact, held = pair
    exact = held.form.to_tiles(exact).astype(jnp.float32)
    lost = held.tiles(jnp.float32) - exact
    return (lost * lost).sum(), (exact * exact).sum()

  @jax.jit
  def total(weight: jax.Array, value: quantized.Quantized) -> jax.Array:
    lost, whole = quantized.over_stack(count, one)((weight, value))
    return jnp.sqrt(lost.sum() / whole.sum())

  return float(total(weight, value))


def held(model: nnx.Module) -> report.QuantReport:
  """The table of the quantized weights that a model holds; empty where it holds none."""
  rows = []
  for site in _sites.sites(model):
    value: Any = site.weight.get_raw_value()
    if isinstance(value, quantized.Quantized):
      usual = type(value.form.quantizer)().tile
      rows.append(report.row(site.name, value, asked=usual))
  return report.QuantReport(tuple(rows), ())

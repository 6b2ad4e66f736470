"""Quantizes a model while it is read from a file: tensor by tensor, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from peftlab import _padded, _parts, _registry, _sites, _specs
from peftlab.quant import convert, encoding, quantized, quantizer, tiles

FILE = 'file'  # the quantization of the file itself
PLAIN = ('F32', 'F16', 'BF16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What of a model is quantized, and how.

  Attributes:
    quant: a name with its options, an instance, or 'file': each weight as it is in a GGUF file.
    tile: see `quantize`.
    where: patterns of layers, see `quantize`.
    exclude: likewise.
  """

  quant: str | quantizer.Quantizer
  tile: tiles.Tile = None
  where: _sites.Patterns = 'all-linear'
  exclude: _sites.Patterns = ()


def outline(
  model: nnx.Module,
  request: Request,
  *,
  kinds: Callable[[tuple], set[str]],
  mesh: jax.sharding.Mesh | None = None,
  rules: _specs.Rules | None = None,
  indivisible: str = 'drop',
) -> nnx.Module:
  """A model of shapes -> the same with quantized weights, as shapes.

  Args:
    model: of shapes.
    request: what is quantized.
    kinds: path of a weight -> the GGUF types of its tensors; empty where it comes from no GGUF.
    mesh: where the arrays will lie.
    rules: logical axes -> mesh axes; None: those in force.
    indivisible: see `quantize`; with 'pad' the model given has padded shapes where it needs them.

  Raises:
    ValueError: see `quantize`; with 'file', a weight whose tensors are of several types or of one
      that no quantizer reads.
  """
  if mesh is not None:
    model = placed(model, mesh, rules)
  chosen: Any = request.quant
  if chosen == FILE:
    chosen = functools.partial(_of_file, kinds=kinds)
  asked: dict[str, Any] = {'where': request.where, 'exclude': request.exclude}
  plans = convert.plan(model, chosen, tile=request.tile, indivisible=indivisible, **asked)
  return convert.carry_out(model, plans)[0]


def placed(
  model: nnx.Module, mesh: jax.sharding.Mesh, rules: _specs.Rules | None = None
) -> nnx.Module:
  """A model of shapes -> the same with the sharding that each array of the base gets on a mesh."""
  parts = _parts.split(model)
  where, _ = _specs.shardings(model, mesh, rules)
  leaves = _parts.flat(parts.base)
  base = {path: jax.tree.map(_placed, leaf, where[path]) for path, leaf in leaves.items()}
  return _parts.merge(parts.replace(base=_parts.nest(base)))


def _placed(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  """A shape that says where its array will lie."""
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _of_file(
  site: _sites.Site, *, kinds: Callable[[tuple], set[str]]
) -> quantizer.Quantizer | None:
  found = kinds((*site.path, site.kind.weight))
  if not found:
    raise ValueError(
      f"quant is 'file', but {site.name} comes from no GGUF file; name a quantizer instead."
    )
  if found <= set(PLAIN):
    return None
  known = {
    cls.gguf_kind: cls
    for cls in map(_registry.quantizers.get, _registry.quantizers.names())
    if cls.gguf_kind
  }
  if len(found) > 1 or not found <= set(known):
    given = ', '.join(sorted(found))
    raise ValueError(
      f"quant is 'file', but the layers of {site.name} are of {given} in the file; expected one of "
      f'{", ".join(sorted(known))} for all of them. Exclude these layers or name a quantizer.'
    )
  return known[found.pop()]()


def fill(
  value: quantized.Quantized,
  layers: Iterable[tuple[tuple[int, ...], np.ndarray, bool]],
  shardings: quantized.Quantized | None,
) -> quantized.Quantized:
  """The arrays of a quantized weight, filled layer by layer; each is encoded as it comes.

  Args:
    value: of shapes, some of them `Padded`.
    layers: (place in the stack, tensor, whether it is blocks of the quantizer's GGUF type) each:
      the weight of one layer, or uint8 [out, tiles, bytes].
    shardings: where the arrays go, None: the default device.
  """
  form, lead = value.form, len(value.stack)
  own, where = None, None
  if shardings is not None:
    shapes = jax.tree.map(_placed, value.arrays, shardings.arrays)
    own = jax.tree.map(lambda shape: _without(shape, lead), shapes)
    where = jax.tree.map(lambda shape: shape.sharding, shapes)
  held: Any = jax.tree.map(
    lambda a, place: jnp.zeros(a.shape, a.dtype, device=place),
    value.arrays,
    where or dict.fromkeys(value.arrays),
    is_leaf=lambda a: a is None,
  )
  put = _set_layer(None if where is None else tuple(sorted(where.items())))
  for index, tensor, blocks in layers:
    made = _from_blocks(form, tensor, own) if blocks else _encoded(form, tensor, own)
    if not lead:
      return quantized.Quantized(made, form)
    held = put(held, made, np.asarray(index, np.int32))
    jax.block_until_ready(held)  # else tensors pile up, waiting
  return quantized.Quantized(held, form)


def _without(shape: Any, lead: int) -> jax.ShapeDtypeStruct:
  """The shape of an array of one layer, and where it goes."""
  spec, mesh = shape.sharding.spec, shape.sharding.mesh
  placed = NamedSharding(mesh, PartitionSpec(*spec.partitions[lead:]))
  return jax.ShapeDtypeStruct(shape.shape[lead:], shape.dtype, sharding=placed)


def _encoded(
  form: quantized.Form, tensor: np.ndarray, own: Mapping[str, Any] | None
) -> dict[str, Any]:
  weight = np.asarray(tensor).reshape(form.shape)
  if own is None:
    return encoding.encode(form, jnp.asarray(weight))
  # Each device reads the part whose tiles it will hold, or the whole where tiles are cut elsewhere.
  codes = own['codes'].sharding
  mesh, spec = codes.mesh, codes.spec.partitions
  entries: list[Any] = [None] * len(form.shape)
  for place, entry in zip(form.order[-len(form.outs) :], spec[-len(form.outs) :], strict=True):
    entries[place] = entry
  entries[form.order[0]] = spec[form.cut]
  fitted, _ = _specs.fit_spec(form.shape, PartitionSpec(*entries), mesh)
  sharding = NamedSharding(mesh, fitted)
  array = jax.make_array_from_callback(weight.shape, sharding, lambda index: weight[index])
  return encoding.encode(form, array, own)


def _from_blocks(
  form: quantized.Form, blocks: np.ndarray, own: Mapping[str, Any] | None
) -> dict[str, Any]:
  made: dict[str, Any] = {}
  for name, array in form.quantizer.from_blocks(np.asarray(blocks)).items():
    array = array.reshape(*array.shape[:-1], *form.outs)
    if own is None:
      made[name] = jnp.asarray(array)
    elif _padded.is_padded(own[name]):
      made[name] = _padded.place_tree(array, own[name])
    else:
      made[name] = _padded.put(array, array.shape, own[name].sharding)
  return made


@functools.cache
def _set_layer(placed: Any) -> Callable[..., dict[str, jax.Array]]:
  """Writes the arrays of one layer into those of a stack, in place."""

  def every(stack: dict, layer: dict, index: jax.Array) -> dict[str, Any]:
    def one(stack: jax.Array, layer: jax.Array) -> jax.Array:
      start = [*index, *(jnp.int32(0) for _ in layer.shape)]
      new = layer.reshape((1,) * len(index) + layer.shape)
      return jax.lax.dynamic_update_slice(stack, new, start)

    return jax.tree.map(one, stack, layer)

  out = None if placed is None else dict(placed)
  return jax.jit(every, donate_argnums=0, out_shardings=out)

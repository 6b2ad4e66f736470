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

from peftlab import _parts, _registry, _sites, _specs
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
) -> nnx.Module:
  """A model of shapes -> the same with quantized weights, as shapes.

  Args:
    model: of shapes.
    request: what is quantized.
    kinds: path of a weight -> the GGUF types of its tensors; empty where it comes from no GGUF.
    mesh: where the arrays will lie.
    rules: logical axes -> mesh axes; None: those in force.

  Raises:
    ValueError: see `quantize`; with 'file', a weight whose tensors are of several types or of one
      that no quantizer reads.
  """
  if mesh is not None:
    parts = _parts.split(model)
    where, _ = _specs.shardings(model, mesh, rules)
    placed = {path: _placed(leaf, where[path]) for path, leaf in _parts.flat(parts.base).items()}
    model = _parts.merge(parts.replace(base=_parts.nest(placed)))
  chosen: Any = request.quant
  if chosen == FILE:
    chosen = functools.partial(_of_file, kinds=kinds)
  plans = convert.plan(
    model, chosen, where=request.where, exclude=request.exclude, tile=request.tile
  )
  return convert.carry_out(model, plans)[0]


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
    value: of shapes.
    layers: (place in the stack, tensor, whether it is blocks of the quantizer's GGUF type) each:
      the weight of one layer, or uint8 [out, tiles, bytes].
    shardings: where the arrays go, None: the default device.
  """
  form, lead = value.form, len(value.stack)
  placed = None if shardings is None else shardings.arrays
  held = {
    name: jnp.zeros(a.shape, a.dtype, device=None if placed is None else placed[name])
    for name, a in value.arrays.items()
  }
  own = None if placed is None else {n: _without(s, lead) for n, s in placed.items()}
  for index, tensor, blocks in layers:
    made = _from_blocks(form, tensor, own) if blocks else _encoded(form, tensor, own)
    if not lead:
      return quantized.Quantized(made, form)
    put = _set_layer(None if placed is None else tuple(sorted(placed.items())))
    held = put(held, made, np.asarray(index, np.int32))
    jax.block_until_ready(held)  # else tensors pile up, waiting
  return quantized.Quantized(held, form)


def _without(sharding: NamedSharding, lead: int) -> NamedSharding:
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions[lead:]))


def _encoded(
  form: quantized.Form, tensor: np.ndarray, own: Mapping[str, NamedSharding] | None
) -> dict[str, jax.Array]:
  weight = np.asarray(tensor).reshape(form.shape)
  if own is None:
    return encoding.encode(form, jnp.asarray(weight))
  # Each device reads the part whose tiles it will hold, or the whole where tiles are cut elsewhere.
  spec = own['codes'].spec.partitions
  entries: list[Any] = [None] * len(form.shape)
  for place, entry in zip(form.order[-len(form.outs) :], spec[-len(form.outs) :], strict=True):
    entries[place] = entry
  mesh = own['codes'].mesh
  first = form.order[0]
  parts = int(np.prod([mesh.shape[a] for a in _specs.entry_axes(spec[0])], dtype=int))
  if form.shape[first] % parts == 0:
    entries[first] = spec[0]
  sharding = NamedSharding(mesh, PartitionSpec(*entries))
  array = jax.make_array_from_callback(weight.shape, sharding, lambda index: weight[index])
  return encoding.encode(form, array, own)


def _from_blocks(
  form: quantized.Form, blocks: np.ndarray, own: Mapping[str, NamedSharding] | None
) -> dict[str, jax.Array]:
  made = {}
  for name, array in form.quantizer.from_blocks(np.asarray(blocks)).items():
    array = array.reshape(*array.shape[:-1], *form.outs)
    if own is None:
      made[name] = jnp.asarray(array)
    else:
      made[name] = jax.make_array_from_callback(
        array.shape, own[name], lambda index, array=array: array[index]
      )
  return made


@functools.cache
def _set_layer(placed: Any) -> Callable[..., dict[str, jax.Array]]:
  """Writes the arrays of one layer into those of a stack, in place."""

  def one(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    start = [*index, *(jnp.int32(0) for _ in layer.shape)]
    new = layer.reshape((1,) * len(index) + layer.shape)
    return jax.lax.dynamic_update_slice(stack, new, start)

  def every(stack: dict, layer: dict, index: jax.Array) -> dict[str, jax.Array]:
    return {name: one(array, layer[name], index) for name, array in stack.items()}

  out = None if placed is None else dict(placed)
  return jax.jit(every, donate_argnums=0, out_shardings=out)

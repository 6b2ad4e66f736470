"""Encoding of a weight: compiled, in slices, each device its own part of the tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from peftlab import _parts, _specs
from peftlab.quant import quantized, quantizer

SMALL = 2**16  # a weight of so few numbers is encoded at once
SLICES = 64

Form = quantized.Form
Shardings = Mapping[str, NamedSharding]


def shapes(form: Form, stack: tuple[int, ...] = ()) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype of the arrays of a quantized weight."""
  weight = jax.ShapeDtypeStruct((form.inputs // form.tile, form.tile, *form.outs), jnp.float32)
  made = jax.eval_shape(lambda w: form.quantizer.compress(form.quantizer.encode(w)), weight)
  return {n: jax.ShapeDtypeStruct((*stack, *a.shape), a.dtype) for n, a in made.items()}


def fitted(
  form: Form, stack: tuple[int, ...], entries: tuple, mesh: Any
) -> tuple[dict[str, NamedSharding], list[_specs.Dropped]]:
  """Where the arrays go, from the entries of the weight's own spec, each fitted to its own shape.

  Args:
    form: of the weight.
    stack: sizes of the stack axes.
    entries: of the spec, stack axes first, one per dimension.
    mesh: the mesh.

  Returns:
    {array: NamedSharding}, and the axes that were dropped, priced, with the array for a path.
  """
  placed, dropped = {}, []
  for name, array in shapes(form, stack).items():
    own = form.leaf_axes(name, tuple(entries[len(stack) :]))
    spec, lost = _specs.fit_spec(array.shape, PartitionSpec(*entries[: len(stack)], *own), mesh)
    placed[name] = NamedSharding(mesh, spec)
    dropped += _specs.priced(lost, name, array, spec, mesh)
  return placed, dropped


def encode(form: Form, weight: jax.Array, shardings: Shardings | None = None) -> dict[str, Any]:
  """A weight [*stack, *own] -> its arrays; the weight is only read.

  Beside weight and arrays no more is held than a slice: a layer's 1/16 or less.

  Args:
    form: of the weight.
    weight: any float dtype, on any mesh.
    shardings: where the arrays go; None: the device of the weight.
  """
  stack = weight.ndim - len(form.shape)
  if shardings is None:
    return _encoder(form, stack, None)(weight)
  mesh = next(iter(shardings.values())).mesh
  # The arithmetic runs on a mesh of Auto axes around the same devices, so that it is one program
  # in either mode; no array moves for that.
  twin = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
  if isinstance(weight.sharding, NamedSharding):
    weight = jax.device_put(weight, NamedSharding(twin, weight.sharding.spec))
  specs = tuple((name, sharding.spec) for name, sharding in shardings.items())
  with jax.set_mesh(twin):
    made = _encoder(form, stack, (twin, specs))(weight)
  return {name: jax.device_put(array, shardings[name]) for name, array in made.items()}


@functools.lru_cache(maxsize=256)
def _encoder(form: Form, stack: int, where: Any) -> Callable[[jax.Array], dict[str, Any]]:
  tiled = quantized.over_stack(stack, functools.partial(_sliced, form.quantizer))
  compress = quantized.over_stack(stack, form.quantizer.compress)
  if where is None:
    return jax.jit(lambda weight: compress(tiled(_tiles(form, stack, weight))))
  mesh, specs = where
  codes = dict(specs)['codes']
  out = {name: NamedSharding(mesh, spec) for name, spec in specs}

  def run(weight: jax.Array) -> dict[str, Any]:
    view = jax.lax.with_sharding_constraint(_tiles(form, stack, weight), NamedSharding(mesh, codes))
    per_tile = _per_tile_specs(form, stack, codes)
    mapped = jax.shard_map(tiled, mesh=mesh, in_specs=codes, out_specs=per_tile, check_vma=False)
    return compress(mapped(view))

  return jax.jit(run, out_shardings=out)


def _tiles(form: Form, stack: int, weight: jax.Array) -> jax.Array:
  """[*stack, *own] -> [*stack, tiles, tile, *outs]."""
  front = tuple(range(stack))
  ordered = jnp.transpose(weight, (*front, *(stack + i for i in form.order)))
  own = (form.inputs // form.tile, form.tile, *form.outs)
  return ordered.reshape(*weight.shape[:stack], *own)


def _per_tile_specs(form: Form, stack: int, codes: PartitionSpec) -> dict[str, PartitionSpec]:
  """Specs of what `encode` gives, from that of the codes: [*stack, tiles, ..., *outs]."""
  kept = len(form.outs)
  entries = codes.partitions
  tile = jax.ShapeDtypeStruct((1, form.tile, *(1,) * kept), jnp.float32)
  ranks = {n: a.ndim for n, a in jax.eval_shape(form.quantizer.encode, tile).items()}
  first, last = entries[: stack + 1], entries[len(entries) - kept :]
  return {n: PartitionSpec(*first, *(None,) * (r - 1 - kept), *last) for n, r in ranks.items()}


def _sliced(chosen: quantizer.Quantizer, w: jax.Array) -> dict[str, jax.Array]:
  """`encode` of [tiles, tile, *outs], slice by slice along its best cut dimension."""
  axes = [0, *range(2, w.ndim)]
  pieces, axis = max((_pieces(w.shape[a], 2 if a == w.ndim - 1 else 1), -a) for a in axes)
  axis = -axis
  if math.prod(w.shape) <= SMALL or pieces == 1:
    return chosen.encode(w.astype(jnp.float32))
  size = w.shape[axis] // pieces

  def encoded(part: jax.Array) -> dict[str, jax.Array]:
    return {n: _bytes(a) for n, a in chosen.encode(part.astype(jnp.float32)).items()}

  def shape_of(count: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (*w.shape[:axis], count, *w.shape[axis + 1 :])
    return jax.eval_shape(encoded, jax.ShapeDtypeStruct(shape, jnp.float32))

  whole, one = shape_of(w.shape[axis]), shape_of(size)
  dims = {n: _axis_of(a, axis, w.ndim) for n, a in whole.items()}
  kinds = jax.eval_shape(chosen.encode, jax.ShapeDtypeStruct(w.shape, jnp.float32))

  def step(i: jax.Array, held: dict[str, jax.Array]) -> dict[str, jax.Array]:
    made = encoded(jax.lax.dynamic_slice_in_dim(w, i * size, size, axis))
    put = jax.lax.dynamic_update_slice_in_dim
    return {n: put(a, made[n], i * one[n].shape[dims[n]], dims[n]) for n, a in held.items()}

  start = {name: jnp.zeros(a.shape, a.dtype) for name, a in whole.items()}
  done = jax.lax.fori_loop(0, pieces, step, start)
  return {n: _from_bytes(a, kinds[n]) for n, a in done.items()}


def _axis_of(array: Any, axis: int, rank: int) -> int:
  """Where an axis of w [tiles, tile, *outs] is in an array [tiles, ..., *outs]."""
  return axis if axis == 0 else array.ndim - rank + axis


def _bytes(array: jax.Array) -> jax.Array:
  """Pairs of half bytes as bytes: XLA's CPU backend writes slices of half bytes very slowly."""
  if _parts.bits(array.dtype) != 4 or array.shape[-1] % 2:
    return array
  pairs = array.reshape(*array.shape[:-1], -1, 2)
  return jax.lax.bitcast_convert_type(pairs, jnp.uint8)


def _from_bytes(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  if array.dtype == like.dtype:
    return array
  return jax.lax.bitcast_convert_type(array, like.dtype).reshape(like.shape)


def _pieces(size: int, least: int) -> int:
  """The greatest divisor of a size up to SLICES whose slices are even where `least` is 2."""
  every = range(min(size, SLICES), 0, -1)
  return next((n for n in every if size % n == 0 and size // n % least == 0), 1)

"""Encoding of a weight: compiled, in slices, each device its own part of the tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from peftlab import _padded, _parts, _specs
from peftlab.quant import quantized, quantizer

SMALL = 2**16  # a weight of so few numbers is encoded at once
SLICES = 64

Form = quantized.Form


def shapes(form: Form, stack: tuple[int, ...] = ()) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype of the arrays of a quantized weight."""
  weight = jax.ShapeDtypeStruct((form.inputs // form.tile, form.tile, *form.outs), jnp.float32)
  made = jax.eval_shape(lambda w: form.quantizer.compress(form.quantizer.encode(w)), weight)
  return {n: jax.ShapeDtypeStruct((*stack, *a.shape), a.dtype) for n, a in made.items()}


def fitted(
  form: Form,
  stack: tuple[int, ...],
  entries: tuple,
  mesh: Any,
  *,
  pad: bool = False,
) -> tuple[dict[str, Any], list[_specs.Dropped]]:
  """The arrays as shapes that say where they go, each from its own shape.

  Args:
    form: of the weight.
    stack: sizes of the stack axes.
    entries: of the weight's own spec, stack axes first, one per dimension.
    mesh: the mesh.
    pad: whether an array that an axis does not divide is stored padded.

  Returns:
    {array: shape, or a `Padded` one}, and the axes that were dropped, priced, with the array for a
    path.
  """
  placed, dropped, lead = {}, [], len(stack)
  for name, array in shapes(form, stack).items():
    own = form.leaf_axes(name, tuple(entries[lead:]))
    wanted, stored = PartitionSpec(*entries[:lead], *own), array.shape
    if pad:
      spec, stored, lost = _padded.pad_spec(array.shape, wanted, mesh, stack=lead)
    else:
      spec, lost = _specs.fit_spec(array.shape, wanted, mesh)
    shape: Any = jax.ShapeDtypeStruct(stored, array.dtype, sharding=NamedSharding(mesh, spec))
    placed[name] = shape if stored == array.shape else _padded.Padded(shape, array.shape[lead:])
    dropped += _specs.priced(lost, name, array, spec, mesh)
  return placed, dropped


def encode(
  form: Form, weight: jax.Array, placed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """A weight [*stack, *own] -> its arrays; the weight is only read, and once.

  Beside weight and arrays no more is held than a slice: a layer's 1/16 or less.

  Args:
    form: of the weight.
    weight: any float dtype, on any mesh.
    placed: of `fitted`: where the arrays go; None: the device of the weight.

  Raises:
    ValueError: a number is NaN or infinite.
  """
  stack = weight.ndim - len(form.shape)
  if placed is None:
    made, wrong = _encoder(form, stack, None)(weight)
    _check_finite(form, wrong)
    return made
  shardings = {name: shape.sharding for name, shape in placed.items()}
  mesh = next(iter(shardings.values())).mesh
  # The arithmetic runs on a mesh of Auto axes around the same devices, so that it is one program
  # in either mode; no array moves for that.
  twin = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
  if isinstance(weight.sharding, NamedSharding):
    weight = jax.device_put(weight, NamedSharding(twin, weight.sharding.spec))
  stored = tuple((n, shardings[n].spec, _stored(shape)) for n, shape in placed.items())
  with jax.set_mesh(twin):
    made, wrong = _encoder(form, stack, (twin, stored))(weight)
  _check_finite(form, wrong)
  made = {name: jax.device_put(array, shardings[name]) for name, array in made.items()}
  return {name: _as(made[name], shape) for name, shape in placed.items()}


def _check_finite(form: Form, wrong: jax.Array) -> None:
  """Raises ValueError where a weight has numbers that no code stands for; counted per layer."""
  if isinstance(wrong, jax.core.Tracer):
    return
  count = int(np.asarray(wrong).sum(dtype=np.int64))
  if count:
    raise ValueError(
      f'{form.name or "A weight"} of shape {form.shape} holds {count:,} numbers that are NaN or '
      f'infinite; expected finite ones, {form.quantizer.name} has no code for others.'
    )


def _stored(shape: Any) -> tuple[int, ...]:
  return tuple((shape.array if _padded.is_padded(shape) else shape).shape)


def _as(array: jax.Array, like: Any) -> Any:
  return _padded.Padded(array, like.own) if _padded.is_padded(like) else array


@functools.lru_cache(maxsize=256)
def _encoder(
  form: Form, stack: int, where: Any
) -> Callable[[jax.Array], tuple[dict[str, Any], jax.Array]]:
  """A weight -> its arrays, and how many of its numbers are not finite [*stack]."""
  tiled = quantized.over_stack(stack, functools.partial(_sliced, form.quantizer))
  compress = quantized.over_stack(stack, form.quantizer.compress)
  if where is None:

    def alone(weight: jax.Array) -> tuple[dict[str, Any], jax.Array]:
      made, wrong = tiled(_tiles(form, stack, weight))
      return compress(made), _per_layer(wrong, stack)

    return jax.jit(alone)
  mesh, stored = where
  out = {name: NamedSharding(mesh, spec) for name, spec, _ in stored}
  whole = {name: shape for name, _, shape in stored}
  codes, shape = next((spec, shape) for name, spec, shape in stored if name == 'codes')

  def run(weight: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    view = _tiles(form, stack, weight)
    wide = (*shape[: stack + 1], form.tile, *shape[stack + 2 :])
    work = _work_spec(codes, stack, wide, mesh)
    per_tile = _per_tile_specs(form, stack, work), work  # each device counts what it encodes
    mapped = jax.shard_map(tiled, mesh=mesh, in_specs=work, out_specs=per_tile, check_vma=False)
    work = NamedSharding(mesh, work)
    made, wrong = mapped(jax.lax.with_sharding_constraint(_padded.widened(view, wide), work))
    if wide != view.shape:  # what is compressed together must not see the padding
      true = (slice(0, view.shape[stack]), ..., *(slice(0, n) for n in form.outs))
      made = {name: a[(*(slice(None),) * stack, *true)] for name, a in made.items()}
    made = {name: _padded.widened(a, whole[name]) for name, a in compress(made).items()}
    return made, _per_layer(wrong, stack)

  return jax.jit(run, out_shardings=(out, NamedSharding(mesh, PartitionSpec())))


def _work_spec(
  codes: PartitionSpec, stack: int, shape: tuple[int, ...], mesh: Any
) -> PartitionSpec:
  """That of the codes with no axis inside a tile, which one device encodes.

  What will cut a tile cuts the last outputs until then, where it fits.
  """
  entries = list(codes.partitions)
  inner = _specs.entry_axes(entries[stack + 1])
  entries[stack + 1] = None
  last = (*_specs.entry_axes(entries[-1]), *inner)
  spec, _ = _specs.fit_spec(shape, PartitionSpec(*entries[:-1], last), mesh)
  return spec


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


def _wrong(w: jax.Array) -> jax.Array:
  """How many numbers of w are not finite, [1, ...] with a dimension for each of w."""
  return jnp.sum(~jnp.isfinite(w), dtype=jnp.int32, keepdims=True)


def _per_layer(wrong: jax.Array, stack: int) -> jax.Array:
  return wrong.sum(range(stack, wrong.ndim))


def _sliced(chosen: quantizer.Quantizer, w: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
  """`encode` of [tiles, tile, *outs] and `_wrong`, slice by slice along its best cut dimension."""
  axes = [0, *range(2, w.ndim)]
  pieces, axis = max((_pieces(w.shape[a], 2 if a == w.ndim - 1 else 1), -a) for a in axes)
  axis = -axis
  if math.prod(w.shape) <= SMALL or pieces == 1:
    return chosen.encode(w.astype(jnp.float32)), _wrong(w)
  size = w.shape[axis] // pieces

  def encoded(part: jax.Array) -> dict[str, jax.Array]:
    return {n: _bytes(a) for n, a in chosen.encode(part.astype(jnp.float32)).items()}

  def shape_of(count: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (*w.shape[:axis], count, *w.shape[axis + 1 :])
    return jax.eval_shape(encoded, jax.ShapeDtypeStruct(shape, jnp.float32))

  whole, one = shape_of(w.shape[axis]), shape_of(size)
  dims = {n: _axis_of(a, axis, w.ndim) for n, a in whole.items()}
  kinds = jax.eval_shape(chosen.encode, jax.ShapeDtypeStruct(w.shape, jnp.float32))

  def step(i: jax.Array, state: tuple[dict[str, jax.Array], jax.Array]) -> tuple:
    held, wrong = state
    part = jax.lax.dynamic_slice_in_dim(w, i * size, size, axis)
    made, put = encoded(part), jax.lax.dynamic_update_slice_in_dim
    held = {n: put(a, made[n], i * one[n].shape[dims[n]], dims[n]) for n, a in held.items()}
    return held, wrong + _wrong(part)

  start = {name: jnp.zeros(a.shape, a.dtype) for name, a in whole.items()}
  none = jnp.zeros((1,) * w.ndim, jnp.int32)
  done, wrong = jax.lax.fori_loop(0, pieces, step, (start, none))
  return {n: _from_bytes(a, kinds[n]) for n, a in done.items()}, wrong


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

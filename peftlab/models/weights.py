"""Streams the tensors of a file into the stacked, sharded arrays of an abstract model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import re
from typing import Any, Protocol

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _parts, _registry, _specs
from peftlab.models.config import DecoderConfig
from peftlab.models.families import WeightMap

Path = tuple[str | int, ...]


class Tensors(Protocol):
  """A reader of `peftlab.formats`: a lazy mapping that knows every shape beforehand."""

  tensors: Mapping[str, Any]

  def __getitem__(self, name: str) -> np.ndarray:
    """The tensor `name`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """One array of the model and the tensors of the file that fill it.

  Attributes:
    path: of the array in the model.
    names: one tensor, or one per layer of a stack.
    stacked: whether the array has a layer axis at 0.
    shape: of the array of one layer.
    dtype: of the array.
    file_shape: what each tensor must have.
    turn: a tensor -> an array of `shape`.
  """

  path: Path
  names: tuple[str, ...]
  stacked: bool
  shape: tuple[int, ...]
  dtype: Any
  file_shape: tuple[int, ...]
  turn: Callable[[np.ndarray], np.ndarray]


def plan(model: nnx.Module, weights: WeightMap, config: DecoderConfig) -> list[Target]:
  """Which tensors fill which arrays of an abstract model, largest first; constants left out."""
  nodes = dict(nnx.iter_graph(model))
  targets = []
  for path, variable in _parts.variables(model).items():
    if isinstance(variable, _parts.Constant):
      continue
    template = weights.name(_parts.path_name(path))
    stacked = '{layer}' in template
    count = config.layers if stacked else 1
    shape = tuple(variable.shape)[1:] if stacked else tuple(variable.shape)
    in_dims = nodes[path[:-1]].in_dims if path[-1] == 'kernel' else None
    targets.append(
      Target(
        path=path,
        names=tuple(template.format(layer=i) for i in range(count)),
        stacked=stacked,
        shape=shape,
        dtype=variable.dtype,
        file_shape=shape if path[-1] == 'table' else _file_shape(shape, in_dims, weights),
        turn=functools.partial(
          _turn, path=path, shape=shape, in_dims=in_dims, weights=weights, config=config
        ),
      )
    )
  return sorted(targets, key=lambda t: -math.prod(t.shape))


def _file_shape(shape: tuple[int, ...], in_dims: int | None, weights: WeightMap) -> tuple[int, ...]:
  if in_dims is None:
    return (math.prod(shape),)
  ins, outs = math.prod(shape[:in_dims]), math.prod(shape[in_dims:])
  return (outs, ins) if weights.out_first else (ins, outs)


def _turn(
  array: np.ndarray,
  *,
  path: Path,
  shape: tuple[int, ...],
  in_dims: int | None,
  weights: WeightMap,
  config: DecoderConfig,
) -> np.ndarray:
  array = weights.change(_parts.path_name(path), array, config)
  if in_dims is not None and weights.out_first:
    array = array.T
  return array.reshape(shape)


def check(targets: list[Target], tensors: Tensors, *, ignored: tuple[str, ...], where: str) -> None:
  """Raises ValueError where the file lacks a tensor, has one too many, or another shape or type.

  Args:
    targets: of `plan`.
    tensors: the file.
    ignored: patterns of tensors that need not be read.
    where: the file's name, for messages.
  """
  wanted = {name: target.file_shape for target in targets for name in target.names}
  found = tensors.tensors
  for name, shape in wanted.items():
    if name not in found:
      near = _registry.did_you_mean(name, [n for n in found if n not in wanted])
      raise ValueError(f"'{where}' has no tensor {name!r} of shape {shape}{near or '.'}")
    if tuple(found[name].shape) != shape:
      raise ValueError(
        f"'{where}' has tensor {name!r} with shape {tuple(found[name].shape)}; expected {shape}."
      )
    dtype = getattr(found[name], 'dtype', np.dtype(np.float32))
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"'{where}' has tensor {name!r} of {dtype}; expected floating point.")
  for name in found:
    if name not in wanted and not any(re.fullmatch(pattern, name) for pattern in ignored):
      near = _registry.did_you_mean(name, wanted)
      raise ValueError(
        f"'{where}' has tensor {name!r} of shape {tuple(found[name].shape)}, which this model has "
        f'no place for{near or "."}'
      )


def fill(
  targets: list[Target],
  tensors: Tensors,
  *,
  mesh: jax.sharding.Mesh | None,
  shardings: Mapping[Path, Any],
) -> dict[Path, jax.Array]:
  """Every target's array, placed. At no time is more than one tensor held beside the arrays.

  A stack is allocated once and each layer is written into it in place (its buffer is donated), so
  neither a second stack nor a list of layers ever exists.
  """
  arrays = {}
  for target in targets:
    sharding = None if mesh is None else shardings[target.path]
    fill_one = _fill_stack if target.stacked else _fill_single
    arrays[target.path] = fill_one(target, tensors, sharding)
  return arrays


def _fill_single(target: Target, tensors: Tensors, sharding: Any) -> jax.Array:
  # A copy: the reader's array may be a view of the file, and the device may keep this one.
  return _put(np.array(target.turn(tensors[target.names[0]]), target.dtype), sharding)


def _fill_stack(target: Target, tensors: Tensors, sharding: Any) -> jax.Array:
  stack = jnp.zeros((len(target.names), *target.shape), target.dtype, device=sharding)
  layer_sharding = None
  if sharding is not None:
    spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
    layer_sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
  for index, name in enumerate(target.names):
    layer = _put(np.asarray(target.turn(tensors[name]), target.dtype), layer_sharding)
    stack = _set_layer(sharding)(stack, layer, jnp.int32(index))
    stack.block_until_ready()  # else tensors pile up, waiting
  return stack


@functools.cache
def _set_layer(sharding: Any) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
  """Writes one layer into a stack, in place."""

  def set_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)

  return jax.jit(set_layer, donate_argnums=0, out_shardings=sharding)


def _put(array: np.ndarray, sharding: Any) -> jax.Array:
  """A numpy array on the default device or, each device its own part, on a mesh."""
  if sharding is None:
    return jax.device_put(array)
  return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def load_weights[Model: nnx.Module](
  model: Model,
  tensors: Tensors,
  *,
  weights: WeightMap,
  config: DecoderConfig,
  constants: Mapping[Path, jax.Array],
  where: str,
  mesh: jax.sharding.Mesh | None = None,
  rules: _specs.Rules | None = None,
) -> Model:
  """An abstract model -> the model with its weights from a file and its constants.

  Raises:
    ValueError: a tensor is missing, one too many, or of another shape; nothing was read then.
  """
  targets = plan(model, weights, config)
  check(targets, tensors, ignored=weights.ignored, where=where)
  shardings = {} if mesh is None else _specs.shardings(model, mesh, rules)[0]
  arrays = fill(targets, tensors, mesh=mesh, shardings=shardings)
  for path, value in constants.items():
    arrays[path] = value if mesh is None else jax.device_put(value, shardings[path])
  parts = _parts.split(model)
  assert arrays.keys() == _parts.flat(parts.base).keys()
  loaded: Any = _parts.merge(parts.replace(base=_parts.nest(arrays)))
  return loaded

"""Streams the tensors of a file into the stacked, sharded arrays of an abstract model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import functools
import math
import re
from typing import Any, Protocol, cast

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _padded, _parts, _processes, _registry, _specs
from peftlab.models import groups
from peftlab.models.config import DecoderConfig
from peftlab.models.experts import ExpertDense
from peftlab.models.families import WeightMap
from peftlab.models.layers import Dense
from peftlab.quant import quantized, streaming

Path = tuple[str | int, ...]

_SMALL = 2**18  # numbers in a stack that is put together before it is placed


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
    names: where in the array -> the tensor that lies there: {(): name} of a single array, {(3,):
      name, ...} of a stack, {(3, 7): name, ...} of a stack of experts.
    lead: sizes of the dimensions that those numbers count.
    shape: of the others.
    dtype: of the array.
    file_shape: what each tensor must have.
    turn: a tensor -> an array of `shape`.
    unturn: the inverse.
    change: of a tensor as it lies in the file, or of its blocks, rows first.
    held: its value as shapes, quantized or padded where it is.
  """

  path: Path
  names: dict[tuple[int, ...], str]
  lead: tuple[int, ...]
  shape: tuple[int, ...]
  dtype: Any
  file_shape: tuple[int, ...]
  turn: Callable[[np.ndarray], np.ndarray]
  unturn: Callable[[np.ndarray], np.ndarray]
  change: Callable[[np.ndarray], np.ndarray]
  held: Any


def plan(
  model: nnx.Module, weights: WeightMap, config: DecoderConfig, *, given: Collection[Path] = ()
) -> list[Target]:
  """Which tensors fill which arrays of an abstract model, largest first.

  Args:
    model: a decoder, whose arrays may be shapes.
    weights: names in the file.
    config: of the decoder.
    given: paths of arrays that do not come from the file.
  """
  nodes = dict(nnx.iter_graph(model))
  targets = []
  for path, variable in _parts.variables(model).items():
    if path in given or isinstance(variable, nnx.LoRAParam) or not isinstance(variable, nnx.Param):
      continue
    node, value = nodes[path[:-1]], variable.get_raw_value()
    name = _parts.path_name(groups.plain_path(path))
    names, lead = _names(path, weights.name(name), node, config)
    shape = tuple(variable.shape)[len(lead) :]
    file_shape, swap = _file_shape(path, node, shape, weights)
    targets.append(
      Target(
        path=path,
        names=names,
        lead=lead,
        shape=shape,
        dtype=variable.dtype,
        file_shape=file_shape,
        turn=functools.partial(
          _turn, name=name, shape=shape, swap=swap, weights=weights, config=config
        ),
        unturn=functools.partial(_unturn, file_shape=file_shape, swap=swap),
        change=functools.partial(_change, name=name, weights=weights, config=config),
        held=value,
      )
    )
  return sorted(targets, key=lambda t: -math.prod(t.shape))


def _names(
  path: Path, template: str, node: Any, config: DecoderConfig
) -> tuple[dict[tuple[int, ...], str], tuple[int, ...]]:
  """Where -> name, and the sizes of what counts there: layers, then experts."""
  numbers = groups.layers_at(path, config) if '{layer}' in template else np.zeros((), int)
  lead = numbers.shape + ((node.shape[0],) if '{expert}' in template else ())
  names = {}
  for index in np.ndindex(*lead):
    layer = str(numbers[index[: numbers.ndim]])
    expert = str(index[-1]) if index else ''
    names[index] = template.replace('{layer}', layer).replace('{expert}', expert)
  return names, lead


def _file_shape(
  path: Path, node: Any, shape: tuple[int, ...], weights: WeightMap
) -> tuple[tuple[int, ...], bool]:
  """What the file's tensor has, and whether the last two dimensions are the other way round."""
  module = _parts.path_name(groups.plain_path(path[:-1]))
  if path[-1] == 'bias' and isinstance(node, Dense):
    return (math.prod(shape),), False
  if path[-1] != 'kernel':
    return shape, False
  swap = weights.out_first and module not in weights.in_first
  if isinstance(node, ExpertDense):
    *outer, ins, outs = shape
  else:
    outer, cut = [], node.in_dims
    ins, outs = math.prod(shape[:cut]), math.prod(shape[cut:])
  return (*outer, *((outs, ins) if swap else (ins, outs))), swap


def _turn(
  array: np.ndarray,
  *,
  name: str,
  shape: tuple[int, ...],
  swap: bool,
  weights: WeightMap,
  config: DecoderConfig,
) -> np.ndarray:
  array = weights.change(name, array, config)
  return (array.swapaxes(-1, -2) if swap else array).reshape(shape)


def _change(
  array: np.ndarray, *, name: str, weights: WeightMap, config: DecoderConfig
) -> np.ndarray:
  return weights.change(name, array, config)


def _unturn(array: np.ndarray, *, file_shape: tuple[int, ...], swap: bool) -> np.ndarray:
  if not swap:
    return array.reshape(file_shape)
  *outer, outs, ins = file_shape
  return array.reshape((*outer, ins, outs)).swapaxes(-1, -2)


def check(targets: list[Target], tensors: Tensors, *, ignored: tuple[str, ...], where: str) -> None:
  """Raises ValueError where the file lacks a tensor, has one too many, or another shape or type.

  Args:
    targets: of `plan`.
    tensors: the file.
    ignored: patterns of tensors that need not be read.
    where: the file's name, for messages.
  """
  wanted = {name: target.file_shape for target in targets for name in target.names.values()}
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


def checked(
  model: nnx.Module,
  tensors: Tensors,
  *,
  weights: WeightMap,
  config: DecoderConfig,
  given: Collection[Path],
  where: str,
) -> list[Target]:
  """The targets of an abstract model, where a file has what they need; only names are read."""
  targets = plan(model, weights, config, given=given)
  ignored = (*weights.ignored, *weights.unread(config))
  check(targets, tensors, ignored=ignored, where=where)
  return targets


def fill(
  targets: list[Target],
  tensors: Tensors,
  *,
  mesh: jax.sharding.Mesh | None,
  shardings: Mapping[Path, Any],
) -> dict[Path, Any]:
  """Every target's array, placed. At no time is more than one tensor held beside the arrays.

  A stack is allocated once and each layer is written into it in place (its buffer is donated), so
  neither a second stack nor a list of layers ever exists.
  """
  arrays: dict[Path, Any] = {}
  for target in targets:
    sharding = None if mesh is None else shardings[target.path]
    if isinstance(target.held, quantized.Quantized):
      arrays[target.path] = streaming.fill(target.held, _layers(target, tensors), sharding)
      continue
    fill_one = _fill_stack if target.lead else _fill_single
    arrays[target.path] = fill_one(target, tensors, sharding)
  return arrays


def _layers(target: Target, tensors: Any) -> Iterator[tuple[tuple[int, ...], np.ndarray, bool]]:
  """(place in the stack, tensor, whether it is GGUF blocks of the weight's own type) each."""
  kind = target.held.form.quantizer.gguf_kind
  for index, name in target.names.items():
    if kind is not None and getattr(tensors.tensors[name], 'kind', None) == kind:
      yield index, target.change(tensors.blocks(name)), True
    else:
      yield index, target.turn(tensors[name]), False


def kinds(targets: list[Target], tensors: Tensors) -> dict[Path, set[str]]:
  """{path: the GGUF types of the tensors that fill it}; nothing for another format."""
  every = {
    t.path: {getattr(tensors.tensors[n], 'kind', '') for n in t.names.values()} for t in targets
  }
  return {path: found - {''} for path, found in every.items()}


def _fill_single(target: Target, tensors: Tensors, sharding: Any) -> jax.Array:
  # A copy: the reader's array may be a view of the file, and the device may keep this one.
  return _put(np.array(target.turn(tensors[target.names[()]]), target.dtype), target, sharding)


def _fill_stack(target: Target, tensors: Tensors, sharding: Any) -> Any:
  if math.prod((*target.lead, *target.shape)) <= _SMALL:  # not worth a program of its own
    small = np.empty((*target.lead, *target.shape), target.dtype)
    for index, name in target.names.items():
      small[index] = target.turn(tensors[name])
    return _put(small, target, sharding)
  (shape,), (where,) = jax.tree.leaves(target.held), jax.tree.leaves(sharding) or (None,)
  stack = jnp.zeros(shape.shape, target.dtype, device=where)
  lead, layer_sharding = len(target.lead), None
  if where is not None:
    spec = jax.sharding.PartitionSpec(*where.spec[lead:])
    layer_sharding = jax.sharding.NamedSharding(where.mesh, spec)
  for index, name in target.names.items():
    turned = np.asarray(target.turn(tensors[name]), target.dtype)
    layer = _whole(_padded.widened(turned, shape.shape[lead:]), layer_sharding)
    stack = _set_layer(where)(stack, layer, np.asarray(index, np.int32))
    stack.block_until_ready()  # else tensors pile up, waiting
  return jax.tree.map(lambda _: stack, target.held)


@functools.cache
def _set_layer(sharding: Any) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
  """Writes one layer into a stack, in place."""

  def set_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    start = [*index, *(jnp.int32(0) for _ in layer.shape)]
    new = layer.reshape((1,) * len(index) + layer.shape)
    return jax.lax.dynamic_update_slice(stack, new, start)

  return jax.jit(set_layer, donate_argnums=0, out_shardings=sharding)


def _put(array: np.ndarray, target: Target, sharding: Any) -> Any:
  """A numpy array as a target holds it, padded where that is."""
  (shape,), (where,) = jax.tree.leaves(target.held), jax.tree.leaves(sharding) or (None,)
  placed = _whole(_padded.widened(array, shape.shape), where)
  return jax.tree.map(lambda _: placed, target.held)


def _whole(array: np.ndarray, sharding: Any) -> jax.Array:
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
  quant: streaming.Request | None = None,
  indivisible: str = 'drop',
) -> Model:
  """An abstract model -> the model with its weights from a file and its constants.

  With `quant` the weights that it names are quantized as they are read; `indivisible` says what is
  done where a mesh axis does not divide an array.

  Raises:
    ValueError: a tensor is missing, one too many, or of another shape, or an axis does not divide
      and that is an error; nothing was read then.
  """
  targets = checked(model, tensors, weights=weights, config=config, given=constants, where=where)
  if mesh is not None and _padded.check_indivisible(indivisible) == 'pad':
    model = cast(Model, _padded.outline(model, mesh, rules))
    targets = plan(model, weights, config, given=constants)
  if quant is not None:
    of = kinds(targets, tensors)
    options: dict[str, Any] = {'kinds': lambda path: of.get(path, set()), 'mesh': mesh}
    options |= {'rules': rules, 'indivisible': indivisible}
    model = cast(Model, streaming.outline(model, quant, **options))
    targets = plan(model, weights, config, given=constants)
  shardings, dropped = ({}, []) if mesh is None else _specs.shardings(model, mesh, rules)
  if indivisible == 'error':
    _padded.refuse(dropped)
  arrays = fill(targets, tensors, mesh=mesh, shardings=shardings)
  for path, value in constants.items():
    arrays[path] = value if mesh is None else _processes.put(value, shardings[path])
  parts = _parts.split(model)
  assert arrays.keys() == _parts.flat(parts.base).keys()
  loaded: Any = _parts.merge(parts.replace(base=_parts.nest(arrays)))
  return loaded

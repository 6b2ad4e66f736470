"""Microbatches: the rows of x, of the context and of caches, cut apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from peftlab import _parts, _specs, _stack


def split(array: jax.Array, count: int, axis: int = 0) -> jax.Array:
  """Rows along `axis` -> [count, ...], rows / count of them along `axis` + 1.

  Row i goes to microbatch i % count, so that the rows of a device stay on it.
  """
  shape = array.shape
  array = _on_fewer(array, (*shape[:axis], shape[axis] // count, *shape[axis + 1 :]))
  cut = array.reshape(*shape[:axis], shape[axis] // count, count, *shape[axis + 1 :])
  return jnp.moveaxis(cut, axis + 1, 0)


def _on_fewer(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Gives up the explicit axes that an array of `shape` cannot lie over; Auto mode sees to it."""
  sharding = jax.typeof(array).sharding
  if not sharding.mesh.explicit_axes:
    return array
  spec = _specs.fit_spec(shape, sharding.spec, sharding.mesh)[0]
  # A dimension of 1 keeps no axis, not even one of size 1: a reshape would move it to the next.
  return jax.reshard(array, P(*(None if n == 1 else s for n, s in zip(shape, spec, strict=True))))


def join(array: jax.Array, axis: int = 0) -> jax.Array:
  """Inverse of `split`."""
  cut = jnp.moveaxis(array, 0, axis + 1)
  return cut.reshape(*cut.shape[:axis], -1, *cut.shape[axis + 2 :])


def batch_size(x: Any, count: int) -> int:
  """The number of rows of a carry that is to be cut into `count` microbatches; 0: it is not cut.

  Raises:
    ValueError: an array of x has no rows, or not as many as the others, or `count` does not divide
      them.
  """
  if count == 1:
    return 0
  shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(x)]
  rows = {shape[0] if shape else None for shape in shapes}
  if len(rows) != 1 or None in rows:
    raise ValueError(
      f'Pipeline(microbatches={count}) cuts x along the first dimension of its arrays, which must '
      f'be the same for all; their shapes are {", ".join(map(str, shapes))}.'
    )
  batch = shapes[0][0]
  if batch % count:
    raise ValueError(
      f'Pipeline(microbatches={count}) must divide the batch, which has {batch} rows.'
    )
  return batch


@dataclasses.dataclass(frozen=True)
class Context:
  """What every layer is given besides x, sorted by what a microbatch gets of it.

  Attributes:
    rows: arrays of which it gets its own rows, by place among the leaves.
    whole: arrays that it gets whole.
    build: {place: array} -> the context.
  """

  rows: dict[int, Any]
  whole: dict[int, Any]
  build: Callable[[dict[int, Any]], tuple]


def sort_context(context: tuple, batch: int, whole: Sequence[int] = ()) -> Context:
  """Sorts a context by its shapes.

  An array whose first dimension is the batch goes in rows; one whose first dimension is 1, or that
  has none, goes whole; what is no array stays what it is.

  Args:
    context: positional arguments of a body.
    batch: the rows of x; 0: nothing is cut.
    whole: places of arguments that go whole, whatever their shapes.

  Raises:
    ValueError: an array of any other shape, or a place that is none.
  """
  for place in whole:
    if not 0 <= place < len(context):
      raise ValueError(f'Pipeline(whole={tuple(whole)}): the context has {len(context)} arguments.')
  leaves, tree = jax.tree.flatten(list(context))
  owners = [place for place, part in enumerate(context) for _ in jax.tree.leaves(part)]
  found: dict[str, dict[int, Any]] = {'rows': {}, 'whole': {}}
  for index, (leaf, owner) in enumerate(zip(leaves, owners, strict=True)):
    if not isinstance(leaf, (jax.Array, np.ndarray)):
      continue
    cut = batch and owner not in whole and leaf.ndim and leaf.shape[0] != 1
    if cut and leaf.shape[0] != batch:
      raise ValueError(
        f'Argument {owner} of the context has shape {leaf.shape}: its first dimension is neither '
        f'the batch ({batch}) nor 1. Where every microbatch is to get it whole, say '
        f'Pipeline(whole=({owner},)).'
      )
    found['rows' if cut else 'whole'][index] = leaf

  def build(arrays: dict[int, Any]) -> tuple:
    return tuple(jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

  return Context(found['rows'], found['whole'], build)


def state_rows(layers: _parts.Parts, stacked: _stack.Stacked, batch: int) -> dict[tuple, int]:
  """{path of a state array with rows: their axis in the array of one layer}.

  A Variable has rows where its logical axes have the word 'batch'.

  Raises:
    ValueError: it has another number of rows than x, or a cache does not say its axes.
  """
  if not batch:
    return {}
  found = {}
  held = _parts.variables(_parts.outline(layers))
  for path, value in _parts.flat(layers.state).items():
    variable = held[path]
    axes, name = variable.get_metadata().get('axes') or (), _parts.path_name(path)
    if 'batch' in axes:
      axis = axes.index('batch')
      if value.shape[axis] != batch:
        raise ValueError(f'{name} has shape {value.shape} with axes {axes}; x has {batch} rows.')
      layer_axis = stacked.axes['state'][path]
      assert layer_axis is not None
      found[path] = axis - (axis > layer_axis)
    elif isinstance(variable, nnx.Cache) and not axes:
      raise ValueError(
        f'{name} is a cache without logical axes, so its rows cannot be told; make it with '
        "axes=(..., 'batch', ...), or run with microbatches=1."
      )
  return found


def merged(array: jax.Array, batch: int, path: tuple) -> jax.Array:
  """What the microbatches made each for itself, [places, microbatches, ...] -> [places, ...].

  Rows of microbatches become rows of the batch; any other number becomes the mean.

  Raises:
    ValueError: it is neither rows nor a real number.
  """
  count = array.shape[1]
  if count == 1:
    return array[:, 0]
  if array.ndim > 2 and array.shape[2] * count == batch:
    return join(jnp.moveaxis(array, 1, 0), axis=1)
  if not jnp.issubdtype(array.dtype, jnp.inexact):
    raise ValueError(
      f'{_parts.path_name(path)}, which a layer made, is {array.dtype} {array.shape[2:]}; of '
      f'{count} microbatches only rows or real numbers can be put together.'
    )
  return jnp.mean(array, axis=1)

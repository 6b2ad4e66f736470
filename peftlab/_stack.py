"""Stacks: layers of one shape kept in one module whose arrays have a layer axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _parts, _specs

STACK_WORDS = ('layers', 'layer', 'stack', 'blocks', 'stages', 'repeats')
NAMED_DIMENSIONS = ('axes', 'out_sharding')
LAYER_ORDER = 'layer_order'  # attribute of a stack whose layers are not in their order


def root_key(rngs: nnx.Rngs | jax.Array | int) -> jax.Array:
  """The key that a seed, a key, or one draw of nnx.Rngs gives.

  Raises:
    ValueError: something else, or a seed that does not fit 32 bits (jax would take another).
  """
  if isinstance(rngs, nnx.Rngs):
    return rngs.params()
  if isinstance(rngs, (int, np.integer)) and not isinstance(rngs, bool):
    if not 0 <= rngs < 2**32:
      raise ValueError(f'The seed {rngs} must be at least 0 and below 2**32.')
    return jax.random.key(np.uint32(rngs))
  if isinstance(rngs, jax.Array) and _parts.is_key(rngs):
    if rngs.ndim:
      raise ValueError(f'rngs has keys of shape {rngs.shape}; expected one key.')
    return rngs
  raise ValueError(f'rngs must be a seed, a jax.random.key or nnx.Rngs, given {rngs!r}.')


def stack(
  make_layer: Callable[[nnx.Rngs], nnx.Module],
  length: int,
  *,
  rngs: nnx.Rngs | jax.Array | int,
  axis: int = 0,
  name: str = 'layers',
) -> nnx.Module:
  """`length` layers as one module whose arrays carry a layer axis; every layer has its own rng.

  Args:
    make_layer: builds one layer; it may itself contain stacks.
    length: how many layers.
    rngs: seed, key, or nnx.Rngs.
    axis: where the layer axis goes (at the end of arrays of lower rank).
    name: the logical name of the layer axis in the metadata of the Variables.

  Raises:
    ValueError: a negative length.
  """
  if length < 0:
    raise ValueError(f'A stack cannot have {length} layers.')
  keys = jax.random.split(root_key(rngs), length)
  parts = jax.vmap(lambda k: _parts.split(make_layer(nnx.Rngs(k))))(keys)
  return _parts.merge(move_in(parts, axis=axis, name=name))


def move_in(parts: _parts.Parts, *, axis: int, name: str) -> _parts.Parts:
  """Parts whose arrays have an unnamed leading layer axis -> at `axis`, named in the metadata."""
  moved = parts.replace(
    **{
      n: jax.tree.map(lambda a: jnp.moveaxis(a, 0, min(axis, a.ndim - 1)), getattr(parts, n))
      for n in ('adapter', 'base', 'state')
    }
  )
  if axis:
    ranks = _ranks(moved)
  else:
    ranks = {}
  model = _parts.outline(moved)
  for path, variable in _parts.variables(model).items():
    add_axis(variable, min(axis, ranks.get(path, axis + 1) - 1), name)
  return moved.replace(graph=_parts.split(model).graph)


def _ranks(parts: _parts.Parts) -> dict[tuple, int]:
  trees = (parts.adapter, parts.base, parts.state)
  return {
    path: min(leaf.ndim for leaf in jax.tree.leaves(value))
    for tree in trees
    for path, value in _parts.flat(tree).items()
  }


def add_axis(variable: nnx.Variable, axis: int, name: str | None) -> None:
  """Writes a new outermost layer axis into the metadata of a Variable."""
  metadata = variable.get_metadata()
  inner = tuple(a + 1 if a >= axis else a for a in metadata.get('stack', ()))
  variable.set_metadata('stack', (axis, *inner))
  for key in NAMED_DIMENSIONS:
    names = metadata.get(key)
    if names is not None:
      variable.set_metadata(key, insert(tuple(names), (axis,), (name,)))


def remove_axis(variable: nnx.Variable, axis: int, rank: int) -> None:
  """Takes the outermost layer axis out of the metadata of a Variable of rank `rank`."""
  metadata = variable.get_metadata()
  if metadata.get('stack'):
    inner = metadata['stack'][1:]
    variable.set_metadata('stack', tuple(a - 1 if a > axis else a for a in inner))
  for key in NAMED_DIMENSIONS:
    names = metadata.get(key)
    if names is not None and len(names) == rank:
      variable.set_metadata(key, tuple(n for i, n in enumerate(names) if i != axis))


def place_axes(stack_axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
  """Where the layer axes of a kernel go in an array of `rank` own dimensions: the same or last."""
  total = rank + len(stack_axes)
  taken: list[int] = []
  for axis in sorted(stack_axes):
    axis = min(axis, total - 1)
    while axis in taken:
      axis -= 1
    taken.append(axis)
  order = sorted(range(len(stack_axes)), key=lambda i: stack_axes[i])
  placed = [0] * len(stack_axes)
  for position, axis in zip(order, sorted(taken), strict=True):
    placed[position] = axis
  return tuple(placed)


def insert(items: tuple, at: tuple[int, ...], new: tuple) -> tuple:
  """`items` with `new[i]` standing at index `at[i]` of the result."""
  where = dict(zip(at, new, strict=True))
  rest = iter(items)
  return tuple(where[i] if i in where else next(rest) for i in range(len(items) + len(new)))


def stack_axes(
  variable: nnx.Variable, rank: int, shape: Sequence[int] | None, path: str
) -> tuple[int, ...]:
  """Which axes of a layer's weight count layers, outermost first.

  In this order: what the Variable says (`stack`), its logical axes, what is left when the layer's
  own sizes are taken away.

  Args:
    variable: of the weight.
    rank: dimensions of the weight of one layer.
    shape: their sizes, or None where the layer does not tell.
    path: for the message.

  Raises:
    ValueError: the rank is too small, or it cannot be told (set metadata `stack=(0,)`).
  """
  full = tuple(variable.get_raw_value().shape)
  extra = len(full) - rank
  said = variable.get_metadata().get('stack')
  if said and len(said) == extra:
    return tuple(said)
  if extra < 0:
    raise ValueError(f'{path} has a weight of shape {full}; its layer uses {rank} dimensions.')
  if extra == 0:
    return ()
  names = _specs.axes_of(variable, full, path) or ()
  named = tuple(i for i, n in enumerate(names) if n in STACK_WORDS)
  if len(named) == extra:
    return named
  fitting = _fitting(full, tuple(shape)) if shape is not None else set()
  if len(fitting) == 1:
    return fitting.pop()
  wanted = f'one layer has {tuple(shape)}' if shape is not None else f'one layer has rank {rank}'
  raise ValueError(
    f'{path} has a weight of shape {full}, {wanted}: which axis counts layers cannot be told. '
    'Build the layers with peftlab.stack, or give the Variable metadata stack=(axis,).'
  )


def _fitting(full: tuple[int, ...], own: tuple[int, ...]) -> set[tuple[int, ...]]:
  """Sets of consecutive axes whose removal from `full` leaves `own`."""
  extra = len(full) - len(own)
  starts = range(len(full) - extra + 1)
  return {tuple(range(s, s + extra)) for s in starts if full[:s] + full[s + extra :] == own}


@dataclasses.dataclass(frozen=True)
class Stacked:
  """A stack seen by an applier.

  Attributes:
    length: the number of layers.
    axes: {'adapter' | 'base' | 'state': {path: layer axis, or None: one array for all layers}}.
    graph: of one layer, its metadata without the layer axis.
    order: the number of the layer at each place of the layer axis (see `layer_order`).
  """

  length: int
  axes: dict[str, dict[tuple, int | None]]
  graph: nnx.GraphDef
  order: tuple[int, ...]

  @property
  def places(self) -> list[int]:
    """Where each layer is, in layer order."""
    return [self.order.index(n) for n in range(self.length)]

  @property
  def in_order(self) -> bool:
    """Whether layer i is at place i and there is no other place."""
    return self.order == tuple(range(self.length))


def stacked(layers: _parts.Parts, axis: int) -> Stacked:
  """How the arrays of a stack are stacked; a Variable's own `stack` wins over `axis`.

  Raises:
    ValueError: an array has no layer axis, or not the length of the others.
  """
  model = _parts.outline(layers)
  held = _parts.variables(model)
  axes: dict[str, dict[tuple, int | None]] = {}
  lengths: dict[int, str] = {}
  for name in ('adapter', 'base', 'state'):
    axes[name] = {}
    for path, value in _parts.flat(getattr(layers, name)).items():
      rank = min((leaf.ndim for leaf in jax.tree.leaves(value)), default=0)
      said = held[path].get_metadata().get('stack') if path in held else None
      default = 0 if name == 'state' else min(axis, rank - 1)
      found = default if said is None else (said[0] if said else None)
      axes[name][path] = found
      if found is None:
        continue
      if not rank > found >= 0:
        raise ValueError(
          f'{_parts.path_name(path)} of shape {value.shape} has no layer axis {found}.'
        )
      for leaf in jax.tree.leaves(value):
        lengths.setdefault(leaf.shape[found], _parts.path_name(path))
      if path in held:
        remove_axis(held[path], found, getattr(value, 'ndim', rank))
  if len(lengths) != 1:
    shown = ', '.join(f'{name} has {n}' for n, name in lengths.items()) or 'it has no array'
    raise ValueError(f'The layers of a stack must be equally many: {shown}.')
  order = layer_order(model, next(iter(lengths)))
  return Stacked(sum(n >= 0 for n in order), axes, _parts.split(model).graph, order)


def layer_order(layers: nnx.Module, places: int) -> tuple[int, ...]:
  """The number of the layer at each place of a stack's layer axis; -1 where there is none.

  Layer i is at place i, but where an applier laid the stack out anew: its `layer_order` says how.

  Raises:
    ValueError: it says so of another number of places.
  """
  order = getattr(layers, LAYER_ORDER, None)
  if order is None:
    return tuple(range(places))
  if len(order) != places:
    raise ValueError(
      f'A stack laid out as {len(order)} places has arrays with {places}; lay it out again.'
    )
  return order


def order_at(model: nnx.Module, path: tuple) -> tuple[int, ...] | None:
  """The `layer_order` of the outermost stack around the module at `path`; None: there is none."""
  node: Any = model
  for key in (*path, None):
    if getattr(node, LAYER_ORDER, None) is not None:
      return getattr(node, LAYER_ORDER)
    if key is not None:
      node = node[key] if isinstance(key, int) else getattr(node, key)
  return None

"""Arrays stored with padding behind them, so that every mesh axis divides them; read without it.

GSPMD keeps an uneven array in the middle of a program as equal shards with padding in the last
ones, but takes and gives none. `Padded` is that layout for the arguments and results of a program:
the array is stored at a multiple of its mesh axes and cut at its first use, which moves nothing.
So a product, a norm or an optimizer never sees the padding, and results are those of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from peftlab import _parts, _registry, _specs

Tree = Any

INDIVISIBLE = ('drop', 'pad', 'error')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded:
  """An array stored longer than it is; a pytree that holds the stored one.

  To its readers it is the array: `shape`, `[...]` and jnp functions know nothing of the padding.

  Attributes:
    array: as stored, [*stack, *stored], a shape, or what else stands for it in a tree.
    own: the true sizes of its last dimensions, those of one layer.
  """

  array: Any
  own: tuple[int, ...] = dataclasses.field(metadata={'static': True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Without padding."""
    return (*self.array.shape[: self.array.ndim - len(self.own)], *self.own)

  @property
  def ndim(self) -> int:
    """Dimensions, stack axes included."""
    return self.array.ndim

  @property
  def size(self) -> int:
    """Numbers, without padding."""
    return math.prod(self.shape)

  @property
  def dtype(self) -> Any:
    """Of the array."""
    return self.array.dtype

  @property
  def sharding(self) -> Any:
    """As it is stored."""
    return self.array.sharding

  def __getitem__(self, index: Any) -> Any:
    whole = cut(self)
    return whole if index is Ellipsis else whole[index]

  def __jax_array__(self) -> jax.Array:
    return cut(self)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    del copy
    return np.asarray(self.array, dtype)[_part(self.shape)]

  def astype(self, dtype: Any) -> jax.Array:
    """Without padding, in another dtype."""
    return cut(self).astype(dtype)


def is_padded(value: Any) -> bool:
  """Whether a value is `Padded`: for `is_leaf`."""
  return isinstance(value, Padded)


def cut(value: Any) -> Any:
  """The array of a `Padded`; anything else as it is."""
  if not isinstance(value, Padded):
    return value
  array, shape = value.array, value.shape
  if isinstance(array, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=_fitted(array.sharding, shape))
  if isinstance(array, jax.core.Tracer):
    placed = jax.typeof(array).sharding
    if AxisType.Explicit in placed.mesh.axis_types:  # takes no uneven array inside either
      array = jax.reshard(array, _fitted(placed, shape))
    return array[_part(shape)]
  return _cutter(value.own, _fitted(array.sharding, shape))(array)


def cut_tree(tree: Tree) -> Tree:
  """A tree with every `Padded` in it cut."""
  return jax.tree.map(cut, tree, is_leaf=is_padded)


def pad_tree(tree: Tree, like: Tree) -> Tree:
  """Inverse of `cut_tree`: arrays stored, in a traced function, as those of `like` are."""

  def one(stored: Any, array: Any) -> Any:
    if not isinstance(stored, Padded):
      return array
    return Padded(widened(array, stored.array.shape), stored.own)

  return jax.tree.map(one, like, tree, is_leaf=is_padded)


def place_tree(tree: Tree, like: Tree) -> Tree:
  """The same for arrays at hand: each goes where that of `like` lies."""

  def one(stored: Any, array: Any) -> Any:
    if not isinstance(stored, Padded):
      return array
    return Padded(put(array, stored.array.shape, stored.sharding), stored.own)

  return jax.tree.map(one, like, tree, is_leaf=is_padded)


def put(array: Any, shape: tuple[int, ...], sharding: Any) -> Any:
  """An array (or a shape) on some devices, stored with a shape."""
  if isinstance(array, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
  if isinstance(array, np.ndarray):
    wide = widened(array, shape)
    return jax.make_array_from_callback(shape, sharding, lambda index: wide[index])
  return _widener(shape, sharding)(array)


def widened(array: Any, shape: Sequence[int]) -> Any:
  """An array (of numpy or JAX) with zeros behind it up to a shape."""
  if tuple(array.shape) == tuple(shape):
    return array
  widths = [(0, more - size) for size, more in zip(array.shape, shape, strict=True)]
  return (np if isinstance(array, np.ndarray) else jnp).pad(array, widths)


def _part(shape: tuple[int, ...]) -> tuple[slice, ...]:
  return tuple(slice(0, n) for n in shape)


def _fitted(sharding: Any, shape: tuple[int, ...]) -> Any:
  if not isinstance(sharding, NamedSharding):
    return sharding
  return NamedSharding(sharding.mesh, _specs.fit_spec(shape, sharding.spec, sharding.mesh)[0])


@functools.lru_cache(maxsize=256)
def _cutter(own: tuple[int, ...], sharding: Any) -> Any:
  return jax.jit(lambda array: cut(Padded(array, own)), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _widener(shape: tuple[int, ...], sharding: Any) -> Any:
  return jax.jit(lambda array: widened(array, shape), out_shardings=sharding)


def check_indivisible(word: Any) -> str:
  """The word itself; ValueError for one that is not in `INDIVISIBLE`."""
  if word not in INDIVISIBLE:
    near = _registry.did_you_mean(str(word), INDIVISIBLE)
    raise ValueError(f'indivisible is {word!r:.60}{near or "."} Choices: {", ".join(INDIVISIBLE)}.')
  return word


def refuse(dropped: Sequence[_specs.Dropped]) -> None:
  """Raises ValueError in one line where any axis was dropped; what `indivisible='error'` means."""
  if not dropped:
    return
  each = (
    f"{d.path} dimension {d.dim} ({d.size}) by '{d.axis}' ({d.axis_size}; would: "
    f'{", ".join(map(str, d.fitting))})'
    for d in dropped
  )
  raise ValueError(
    f"indivisible is 'error', and {len(dropped)} mesh axes do not divide: {'; '.join(each)}. "
    "Expected axes that divide, or indivisible='drop' or 'pad'."
  )


def pad_spec(
  shape: Sequence[int], spec: PartitionSpec, mesh: Any, *, stack: int = 0
) -> tuple[PartitionSpec, tuple[int, ...], list[_specs.Dropped]]:
  """The spec with every mesh axis that lessens what a device holds, and the shape stored for it.

  A dimension is stored as the next multiple of its axes: 9 over 4 as 12, the last device holding
  padding alone. An axis that would lessen nothing (of a dimension of 1, say) is dropped.

  Args:
    shape: of the array.
    spec: wanted, see `fit_spec`, which raises for it.
    mesh: the mesh.
    stack: so many leading dimensions count layers; an axis that does not divide one of them is
      dropped there, for places without a layer are the business of the pipeline applier.

  Returns:
    The spec, one entry per dimension, the stored shape, and what was dropped (with path '').
  """
  fitted, lost = _specs.fit_spec(shape, spec, mesh)
  if not lost:
    return fitted, tuple(shape), []
  wanted = (*spec.partitions, *(None,) * (len(shape) - len(spec.partitions)))
  entries, stored, dropped = list(fitted.partitions), list(shape), []
  for dim in {d.dim: None for d in lost}:
    if dim < stack:
      dropped += [d for d in lost if d.dim == dim]
      continue
    keep, parts, size = [], 1, shape[dim]
    for axis in _specs.entry_axes(wanted[dim]):
      more = parts * mesh.shape[axis]
      if -(-size // more) < -(-size // parts) or size == 0:
        keep.append(axis)
        parts = more
      else:
        dropped += [d for d in lost if (d.dim, d.axis) == (dim, axis)]
    entries[dim] = _specs.as_entry(keep)
    stored[dim] = -(-size // parts) * parts
  return fitted.update(partitions=tuple(entries)), tuple(stored), dropped


@dataclasses.dataclass(frozen=True)
class Padding:
  """A dimension of a parameter that is stored longer than it is.

  Attributes:
    path: of the array, dotted.
    dim: the dimension, `size` its size and `stored` the one in memory.
    axes: the mesh axes that cut it.
    extra_bytes: what a device holds more than if the axes divided it.
  """

  path: str
  dim: int
  size: int
  stored: int
  axes: tuple[str, ...]
  extra_bytes: int

  def __str__(self) -> str:
    return (
      f'{self.path}: dimension {self.dim} ({self.size}) is stored as {self.stored} for '
      f'{" x ".join(self.axes)}; +{self.extra_bytes:,} bytes per device'
    )


def paddings(model: nnx.Module) -> list[Padding]:
  """Every dimension that a model stores padded, on its mesh."""
  found = []
  for path, variable in _parts.variables(model).items():
    value = variable.get_raw_value()
    for inner, leaf in jax.tree.leaves_with_path(value, is_leaf=is_padded):
      if isinstance(leaf, Padded):
        name = '.'.join(
          p for p in (_parts.path_name(path), jax.tree_util.keystr(inner[-1:], simple=True)) if p
        )
        found += _paddings(name, leaf)
  return found


def _paddings(name: str, value: Padded) -> list[Padding]:
  spec, mesh = value.sharding.spec, value.sharding.mesh
  bits = _parts.bits(value.dtype)
  stored = math.prod(value.array.shape) // _specs.shards(spec, mesh)
  return [
    Padding(
      name, dim, size, wide, _specs.entry_axes(spec[dim]),
      extra_bytes=stored * (wide - size) * bits // (8 * wide),
    )
    for dim, (size, wide) in enumerate(zip(value.shape, value.array.shape, strict=True))
    if size != wide
  ]  # fmt: skip


def outline(
  model: nnx.Module, mesh: jax.sharding.Mesh, rules: _specs.Rules | None = None
) -> nnx.Module:
  """A model of shapes -> the same with a padded shape for every parameter that needs one."""
  parts = _parts.split(model)
  held = _parts.variables(model)
  trees = {}
  for name in ('adapter', 'base'):
    leaves = _parts.flat(getattr(parts, name))
    wide = {p: _wide(held.get(p), v, _parts.path_name(p), mesh, rules) for p, v in leaves.items()}
    trees[name] = _parts.nest(wide)
  return _parts.merge(parts.replace(**trees))


def _wide(variable: Any, value: Any, path: str, mesh: Any, rules: Any) -> Any:
  """The value of one Variable as shapes; what has no logical axes stays as it is."""
  if variable is None:
    return value
  stack = variable.get_metadata().get('stack', ())
  if stack != tuple(range(len(stack))):
    return value  # its own dimensions are not the last ones

  def one(array: Any, axes: Any) -> Any:
    spec = _specs.spec_for(axes or (), mesh, rules)
    spec, shape, _ = pad_spec(array.shape, spec, mesh, stack=len(stack))
    if shape == tuple(array.shape):
      return array
    placed = NamedSharding(mesh, spec)
    wide = jax.ShapeDtypeStruct(shape, array.dtype, sharding=placed)
    return Padded(wide, tuple(array.shape[len(stack) :]))

  return jax.tree.map(one, value, _specs.leaf_axes(variable, value, path))


def explained(dropped: Sequence[_specs.Dropped], model: nnx.Module) -> list[_specs.Dropped]:
  """What was dropped from a model that is padded, each with the reason why it was."""
  stacks = {
    _parts.path_name(path): tuple(variable.get_metadata().get('stack', ()))
    for path, variable in _parts.variables(model).items()
  }

  def reason(lost: _specs.Dropped) -> str:
    stack = stacks.get(lost.path, ())
    if lost.dim in stack:
      return 'stack axes are not; the pipeline applier lays layers out'
    if stack != tuple(range(len(stack))):
      return 'its layer axes are not the first'
    return 'no device would hold less'

  return [dataclasses.replace(lost, reason=reason(lost)) for lost in dropped]


def place(
  model: nnx.Module,
  mesh: jax.sharding.Mesh,
  rules: _specs.Rules | None = None,
  *,
  indivisible: str = 'drop',
) -> tuple[nnx.Module, list[_specs.Dropped]]:
  """A model whose arrays lie on `mesh` as its metadata and the rules say (others are shared).

  Args:
    model: any nnx model.
    mesh: where its arrays go.
    rules: logical axes -> mesh axes; None: those in force.
    indivisible: what is done where a mesh axis does not divide a dimension: it is dropped there,
      the dimension is padded in memory, or (error) nothing is placed.

  Returns:
    The new model and the axes that were dropped.

  Raises:
    ValueError: an axis does not divide, and that is an error.
  """
  if check_indivisible(indivisible) == 'error':
    refuse(_specs.shardings(model, mesh, rules)[1])
  if indivisible != 'pad':
    return _specs.place(model, mesh, rules)
  wide = outline(model, mesh, rules)
  where, dropped = _specs.shardings(wide, mesh, rules)
  dropped = explained(dropped, wide)
  parts, like = _parts.split(model), _parts.split(wide)
  trees = {}
  for name in ('adapter', 'base', 'state'):
    shapes = _parts.flat(getattr(like, name))
    trees[name] = _parts.nest(
      {
        path: jax.device_put(place_tree(value, shapes[path]), where[path])
        for path, value in _parts.flat(getattr(parts, name)).items()
      }
    )
  return _parts.merge(parts.replace(**trees)), dropped

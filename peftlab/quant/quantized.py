"""A quantized weight: codes and scales as one value of one Variable, read as a kernel."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _kernel, _packed, _padded, _specs
from peftlab.quant import product, quantizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """What is static about a quantized weight.

  Attributes:
    quantizer: with its tile settled (0: all inputs).
    words: per dimension of the weight of one layer, as `Layout` has them.
    shape: sizes of those dimensions.
    dtype: that the weight had.
    tiled: the word of the dimensions that are cut into tiles: 'in', and of a lookup 'out', so that
      a row is decoded by itself.
    name: of the weight, for messages; no part of what it is.
  """

  quantizer: quantizer.Quantizer
  words: tuple[str, ...]
  shape: tuple[int, ...]
  dtype: str
  tiled: str = 'in'
  name: str = dataclasses.field(default='', compare=False)

  @property
  def order(self) -> tuple[int, ...]:
    """The dimensions of the weight, those that are tiled first."""
    places = range(len(self.words))
    order = sorted(places, key=lambda i: ('in', _kernel.TAP, 'out').index(self.words[i]))
    return tuple(sorted(order, key=lambda i: not self._is_tiled(i)))

  @property
  def inputs(self) -> int:
    """Numbers that are cut into tiles, per output."""
    return math.prod(size for i, size in enumerate(self.shape) if self._is_tiled(i))

  @property
  def outs(self) -> tuple[int, ...]:
    """Sizes of the dimensions that are not tiled."""
    return tuple(self.shape[i] for i in self.order if not self._is_tiled(i))

  def _is_tiled(self, dimension: int) -> bool:
    return (self.words[dimension] in _kernel.INPUTS) == (self.tiled == 'in')

  @property
  def tile(self) -> int:
    """Numbers that share a scale."""
    return self.quantizer.tile or self.inputs

  @property
  def bits(self) -> float:
    """Bits per weight, by arithmetic."""
    return self.quantizer.bits(self.inputs, self.outs)

  def rank(self, name: str) -> int:
    """Dimensions of the array `name` of one layer."""
    words = self.quantizer.dims[name].split()
    return sum(len(self.outs) if word == 'out' else 1 for word in words)

  @property
  def cut(self) -> int:
    """Which dimension of the codes the axes of the inputs cut: the tiles; of one tile itself."""
    return int(self.inputs == self.tile)

  def leaf_axes(self, name: str, axes: tuple) -> tuple:
    """Something per dimension of the weight of one layer -> per dimension of the array `name`."""
    ordered = [axes[i] for i in self.order]
    kept = ordered[len(ordered) - len(self.outs) :]
    taken: dict[str, tuple] = {'out': tuple(kept), 'groups': (kept[0],)}
    words = self.quantizer.dims[name].split()
    if len(words) > self.cut and words[0] == 'tiles' and words[self.cut] not in taken:
      words[self.cut], taken['inputs'] = 'inputs', (ordered[0],)
    return tuple(axis for word in words for axis in taken.get(word, (None,)))

  def to_tiles(self, weight: jax.Array) -> jax.Array:
    """A weight of one layer -> [tiles, tile, *outs]."""
    ordered = jnp.transpose(weight, self.order)
    return ordered.reshape(self.inputs // self.tile, self.tile, *self.outs)

  def from_tiles(self, tiles: jax.Array) -> jax.Array:
    """Inverse of `to_tiles`."""
    order = self.order
    ordered = tiles.reshape([self.shape[i] for i in order])
    return jnp.transpose(ordered, [order.index(i) for i in range(len(order))])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(_packed.Packed):
  """A quantized weight in the place of its array.

  Attributes:
    arrays: by name, as the quantizer's `dims` say, each with the stack axes first; where a mesh
      axis does not divide one it may be `Padded`.
    form: what is static.
  """

  arrays: dict[str, Any]
  form: Form = dataclasses.field(metadata={'static': True})

  @property
  def stack(self) -> tuple[int, ...]:
    """Sizes of the stack axes."""
    codes = self.arrays['codes']
    return tuple(codes.shape[: codes.ndim - self.form.rank('codes')])

  @property
  def shape(self) -> tuple[int, ...]:
    """See `Packed.shape`."""
    return (*self.stack, *self.form.shape)

  @property
  def dtype(self) -> Any:
    """The dtype that the weight had."""
    return jnp.dtype(self.form.dtype)

  @property
  def sharding(self) -> Any:
    """Of the weight: that of the codes, by the weight's own dimensions."""
    codes, form = self.arrays['codes'], self.form
    placed = codes.sharding
    if not isinstance(placed, NamedSharding):
      return placed
    stack = len(self.stack)
    entries = placed.spec.partitions
    entries = entries + (None,) * (codes.ndim - len(entries))
    own: list[Any] = [None] * len(form.shape)
    order, kept = form.order, len(form.outs)
    own[order[0]] = entries[stack + form.cut]
    for place, entry in zip(order[len(order) - kept :], entries[codes.ndim - kept :], strict=True):
      own[place] = entry
    return NamedSharding(placed.mesh, PartitionSpec(*entries[:stack], *own))

  def leaf_axes(self, axes: tuple) -> Quantized:
    """See `Packed.leaf_axes`."""
    stack = len(axes) - len(self.form.shape)
    named = {}
    for name, array in self.arrays.items():
      own = (*axes[:stack], *self.form.leaf_axes(name, tuple(axes[stack:])))
      named[name] = jax.tree.map(lambda _, own=own: own, array)  # of a Padded, of what it holds
    return Quantized(named, self.form)

  def tiles(self, dtype: Any) -> jax.Array:
    """One layer, decoded: [tiles, tile, *outs]."""
    return product.tiles(self.form.quantizer, self.arrays, dtype)

  def matrix(self, dtype: Any = jnp.float32) -> jax.Array:
    """See `Packed.matrix`."""

    def one(layer: Quantized) -> jax.Array:
      return _kernel.as_matrix(layer.form.from_tiles(layer.tiles(dtype)), self.form.words)

    return over_stack(len(self.stack), one)(self)  # a layer with experts has a stack of them

  def dot(self, x: jax.Array, specs: Quantized | None = None) -> jax.Array:
    """See `Packed.dot`."""
    return self._product(x, specs, over_tiles=self.form.tiled == 'in')

  def dot_transposed(self, x: jax.Array, specs: Quantized | None = None) -> jax.Array:
    """x [..., out] times the transposed kernel of one layer -> [..., in]: a tied head."""
    return self._product(x, specs, over_tiles=self.form.tiled == 'out')

  def _product(self, x: jax.Array, specs: Quantized | None, *, over_tiles: bool) -> jax.Array:
    gathered = None if specs is None else tuple(sorted(specs.arrays.items()))
    how = product.How(self.form.quantizer, gathered, over_tiles)
    return product.product(how, x, self.arrays)

  def rows(self, index: jax.Array, dtype: Any) -> jax.Array:
    """See `Packed.rows`."""
    form = self.form
    arrays = form.quantizer.expand(_padded.cut_tree(self.arrays))
    if form.tiled == 'in':
      place = {name: a[index // form.tile] for name, a in arrays.items()}
      found = form.quantizer.decode(place, dtype)  # [n, tile, *outs]
      chosen = found[jnp.arange(index.shape[0]), index % form.tile]
      return chosen.reshape(index.shape[0], -1)
    places = jnp.unravel_index(index, form.outs)
    taken = {name: a[(..., *places)] for name, a in arrays.items()}  # [tiles, ..., n]
    return form.quantizer.decode(taken, dtype).reshape(form.inputs, -1).T

  def dense(self, dtype: Any = None) -> jax.Array:
    """See `Packed.dense`; decoded in float32 and rounded once."""
    placed = getattr(self.arrays['codes'], 'sharding', None)
    sharding = None
    if isinstance(placed, NamedSharding):  # the codes may be padded, the numbers are not
      spec, _ = _specs.fit_spec(self.shape, self.sharding.spec, placed.mesh)
      sharding = NamedSharding(placed.mesh, spec)
    return _dense(jnp.dtype(dtype or self.form.dtype), sharding)(self)

  def __getitem__(self, index: Any) -> Any:
    """`[...]` is the value itself; arrays of places, one per dimension, give those numbers."""
    if index is Ellipsis:
      return self
    if not isinstance(index, tuple) or len(index) != self.ndim:
      raise ValueError(
        f'A quantized weight of shape {self.shape} takes an index per dimension, given {index!r}.'
      )
    return _points(self, tuple(jnp.asarray(i) for i in index))

  def astype(self, dtype: Any) -> jax.Array:
    """The whole weight in numbers of a dtype: for code that knows nothing of quantization."""
    return self.dense().astype(dtype)

  @property
  def T(self) -> jax.Array:  # noqa: N802
    """The whole weight in numbers, transposed."""
    return self.dense().T


def over_stack(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
  """`function` of one layer, mapped one by one over so many leading stack axes."""
  for _ in range(count):
    function = _mapped(function)
  return function


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
  return lambda tree: jax.lax.map(function, tree)


@functools.lru_cache(maxsize=64)
def _dense(dtype: Any, sharding: Any) -> Callable[[Quantized], jax.Array]:
  def one(layer: Quantized) -> jax.Array:
    return layer.form.from_tiles(layer.tiles(jnp.float32)).astype(dtype)

  def every(value: Quantized) -> jax.Array:
    return over_stack(len(value.stack), one)(value)

  return jax.jit(every, out_shardings=sharding)


def _points(value: Quantized, index: tuple[jax.Array, ...]) -> jax.Array:
  form, stack = value.form, len(value.stack)
  index = jnp.broadcast_arrays(*index)
  shape = index[0].shape
  flat = [i.reshape(-1) for i in index]
  layers, own = tuple(flat[:stack]), [flat[stack + i] for i in form.order]
  kept = len(form.outs)
  sizes = [form.shape[i] for i in form.order[: len(own) - kept]]
  place = jnp.zeros_like(own[0])
  for number, size in zip(own, sizes, strict=False):
    place = place * size + number
  arrays = over_stack(stack, form.quantizer.expand)(_padded.cut_tree(value.arrays))
  outs = tuple(own[len(own) - kept :])
  found = {}
  for name, array in arrays.items():
    middle = (slice(None),) * (array.ndim - stack - 1 - kept)
    taken = array[(*layers, place // form.tile, *middle, *outs)]  # [n, ...]
    found[name] = taken[..., None]
  decoded = form.quantizer.decode(found, jnp.float32)[..., 0]  # [n, tile]
  chosen = decoded[jnp.arange(decoded.shape[0]), place % form.tile]
  return chosen.reshape(shape).astype(form.dtype)

"""A batch whose rows have adapters of their own: `apply` mapped over rows, arrays from a bank."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _batch, _kernel, _layer, _parts

NONE = -1  # in the place of a row's adapter: the base


class Bank(_layer.Attached):
  """Adapters of one type and size at one layer, and which of them each row of the batch has.

  Rows are the leading part of a layer's tokens: row i of a batch of n is tokens i t to (i + 1) t of
  the n t that the layer is called with.

  Attributes:
    adapter: the type and its fields.
    arrays: {slot: [capacity, layers, *own]}, of a shared slot [capacity, *own]. They are not cut by
      an applier: a layer finds its own by `number`.
    number: which of `layers` this is; one per layer of a stack.
    of_row: the place of each row's adapter in the bank or `NONE`, [rows] int32.
    order: the rows, those that have an adapter here first, [rows] int32.
    count: how many those are.
    chunk: rows that are computed at once.
  """

  def __init__(
    self,
    adapter: _adapter.Adapter,
    arrays: Mapping[str, jax.Array],
    number: jax.Array,
    rows: RowPlan,
    *,
    stack: tuple[int, ...] = (),
  ):
    def whole(array: jax.Array) -> _parts.AdapterConstant:
      return _parts.AdapterConstant(array, stack=())

    self.adapter = adapter
    self.label = _layer.Label('rows')
    self.active = True
    self.arrays = nnx.Dict({name: whole(array) for name, array in arrays.items()})
    metadata: dict[str, Any] = {'stack': stack} if stack else {}
    self.number = _parts.AdapterConstant(number, **metadata)
    self.of_row, self.order, self.count = map(whole, (rows.of_row, rows.order, rows.count))
    self.chunk = rows.chunk

  def slots(self) -> dict[str, _adapter.Slot]:
    """The slots that the layer has."""
    return {name: slot for name, slot in self.adapter.slots().items() if name in self.arrays}

  def change(self, view: _kernel.View, base: _layer.FrozenKernel) -> jax.Array:
    """See `Attached.change`; rows without an adapter here are left as they are."""
    rows = self.of_row.shape[0]
    _check(view, base, rows)
    bare = base(base.inputs).reshape(rows, -1, base.shape[1])
    x = _by_row(view, base, (rows, bare.shape[1]))

    def of(chosen: jax.Array) -> jax.Array:
      values = self._take(self.of_row[...][chosen], bare.dtype, base.sizes)

      def one(x: jax.Array, bare: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        here = _OneRow.of(x, bare, view, base)
        return self.adapter.apply(here.inputs, here, _adapter.Values(arrays))

      return jax.vmap(one)(x[chosen], bare[chosen], values).astype(bare.dtype)

    return self._for_rows(of, bare).reshape(-1, bare.shape[-1])

  def _for_rows(self, of: Any, bare: jax.Array) -> jax.Array:
    """`bare` [rows, t, out] with the rows that have an adapter here replaced by `of(rows)`."""
    rows, order = bare.shape[0], self.order[...]
    here = (self.of_row[...] != NONE)[:, None, None]
    if self.chunk >= rows:
      some = self.count[...] > 0
      return jax.lax.cond(some, lambda: jnp.where(here, of(jnp.arange(rows)), bare), lambda: bare)

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
      # The last chunk may begin earlier: it then computes some rows again, to the same values.
      chosen = jax.lax.dynamic_slice_in_dim(order, i * self.chunk, self.chunk)
      return y.at[chosen].set(jnp.where(here[chosen], of(chosen), y[chosen]))

    return jax.lax.fori_loop(0, -(-self.count[...] // self.chunk), step, bare)

  def _take(self, places: jax.Array, dtype: Any, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
    """{slot: [rows, *own]} of the adapters at some places of the bank."""
    found = {}
    for name, slot in self.slots().items():
      if slot.aside:
        continue
      array = self.arrays[name][...]
      # A place of -1 takes what is there; that row is not used.
      value = array[places] if slot.shared else array[places, self.number[...]]
      if slot.shared:
        shape = _adapter.slot_shape(slot, self.adapter, sizes=sizes)
        value = _layer.part_of(value, (value.shape[0], *shape))
      found[name] = value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else value
    return found


def _by_row(view: _kernel.View, base: _layer.FrozenKernel, rows: tuple[int, int]) -> jax.Array:
  """The input of each row: [rows, t, in], or what a lookup is called with, [rows, t, ...]."""
  if not isinstance(base.inputs, _kernel.Lazy):
    return base.inputs.reshape(*rows, -1)
  x = view.inputs
  return x.reshape(*rows, *(() if x.size == math.prod(rows) else x.shape[-1:]))


def _of_copy(view: _kernel.View, inputs: jax.Array) -> _kernel.View:
  """The same call with another input, of a copy of the layer on the same arrays.

  Inside a vmap the layer's own Variables cannot be given other arrays; those of a copy can.
  """
  layer, forward = _parts.merge(_parts.split(view.layer)), view.forward
  assert isinstance(forward, functools.partial)  # AdaptedLayer made it
  return _kernel.View(layer, functools.partial(forward.func, layer, **forward.keywords), inputs)


def _check(view: _kernel.View, base: _layer.FrozenKernel, rows: int) -> None:
  layer = type(view.layer).__name__
  if view.groups is not None:
    raise ValueError(
      f'A layer with experts ({layer}) cannot have adapters by row: its rows are sorted by expert.'
    )
  tokens = base(base.inputs).shape[0]
  free = view.inputs.ndim - (view.layout.words.count('in') if view.names.linear else 0)
  batched = free > 1  # else all tokens are in one dimension
  if tokens % rows or (batched and view.inputs.shape[0] != rows):
    raise ValueError(
      f'A batch of {rows} rows with adapters of their own met a layer ({layer}) with an input of '
      f'{view.inputs.shape}; expected {rows} rows first, or as many tokens of each.'
    )


@dataclasses.dataclass(frozen=True)
class RowPlan:
  """What every layer of a bank is told about the rows of a batch, see `Bank`."""

  of_row: jax.Array
  order: jax.Array
  count: jax.Array
  chunk: int


@dataclasses.dataclass
class _OneRow:
  """The `Base` of one row, inside a vmap over rows."""

  inputs: Any
  bare: jax.Array
  whole: _layer.FrozenKernel

  @classmethod
  def of(
    cls, x: jax.Array, bare: jax.Array, view: _kernel.View, whole: _layer.FrozenKernel
  ) -> _OneRow:
    """From x [t, in], or what a lookup is called with."""
    if isinstance(whole.inputs, _kernel.Lazy):
      return cls(_kernel.Lazy(_of_copy(view, x), bare.dtype), bare, whole)
    return cls(x, bare, whole)

  @property
  def shape(self) -> tuple[int, int]:
    return self.whole.shape

  def __call__(self, x: Any) -> jax.Array:
    return self.bare if x is self.inputs else self.whole(x)

  def weight(self) -> jax.Array:
    return self.whole.weight()

  def bias(self) -> jax.Array:
    return self.whole.bias()

  def dropout(self, x: Any, rate: float | jax.Array) -> Any:
    del rate
    return x

  @property
  def batch(self) -> _batch.Batch | _batch.Everywhere:
    raise ValueError('A row with an adapter of its own does not tell which tokens it has.')


def check_batch(model: nnx.Module, rows: int) -> None:
  """Raises ValueError where a model with banks is called with another number of rows."""
  expected = batch_of(model)
  if expected is not None and rows != expected:
    raise ValueError(
      f'The batch has {rows} rows; the model has an adapter or None for each of {expected}. Ask '
      'the pool for a model of these rows.'
    )


def batch_of(model: nnx.Module) -> int | None:
  """How many rows a model with banks is for; None where it has none."""
  for _, node in nnx.iter_graph(model):
    if isinstance(node, Bank):
      return node.of_row.shape[0]
  return None

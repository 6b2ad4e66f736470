"""A layer that carries adapters: what `attach` makes of a layer, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _batch, _groups, _kernel, _packed, _parts, _points, _specs


@dataclasses.dataclass(frozen=True)
class Label:
  """A name that does not count when graphs are compared, so swapping names compiles nothing."""

  text: str = dataclasses.field(compare=False)


class Attached(nnx.Module):
  """One adapter at one layer: its arrays, one attribute per slot, and its rng if it draws.

  Where a layer has experts, each has arrays of its own, or all share them (`one`).
  """

  def __init__(
    self,
    adapter: _adapter.Adapter,
    name: str,
    arrays: Mapping[str, _parts.AdapterParam],
    rng: tuple[nnx.RngKey, nnx.RngCount] | None = None,
    *,
    one: bool = False,
  ):
    self.adapter = adapter
    self.one = one  # all experts of the layer share the arrays
    self.label = Label(name)
    self.active = True
    for slot, variable in arrays.items():
      setattr(self, slot, variable)
    if rng is not None:
      # What model.train() and model.eval() switch; as every nnx layer, it starts in training.
      self.deterministic = False
      self.rng_key, self.rng_count = rng

  @property
  def name(self) -> str:
    """The adapter's name."""
    return self.label.text

  def slots(self) -> dict[str, _adapter.Slot]:
    """The slots that this layer has: all but those of a bias it lacks."""
    return {name: slot for name, slot in self.adapter.slots().items() if hasattr(self, name)}

  def values(self, dtype: Any, sizes: Mapping[str, int]) -> _adapter.Values:
    """The slots' arrays in the dtype of the computation; no gradient reaches a frozen one.

    Of a shared array a kernel with sizes {'in': n, 'out': m} gets its own part.
    """
    arrays = {}
    for name, slot in self.slots().items():
      if slot.aside:
        continue
      variable = getattr(self, name)
      value = variable[...]
      if slot.shared:
        value = part_of(value, _adapter.slot_shape(slot, self.adapter, sizes=sizes))
      if jnp.issubdtype(value.dtype, jnp.inexact):
        value = value.astype(dtype)
      frozen = isinstance(variable, _parts.AdapterConstant)
      arrays[name] = jax.lax.stop_gradient(value) if frozen else _kernel.tall(value)
    return _adapter.Values(arrays, type(self.adapter).__name__)

  def change(self, view: _kernel.View, base: FrozenKernel) -> jax.Array:
    """The layer's output without its bias as this adapter alone makes it, [tokens, out]."""
    base.key = self.next_key()
    values = self.values(base(base.inputs).dtype, base.sizes)
    layer = plain_class(type(view.layer)).__name__
    with _adapter.noted(self.adapter, 'apply', f'{layer}, adapter {self.name!r}'):
      if view.groups is not None:
        return apply_by_expert(self, base, values, view.groups)
      y = self.adapter.apply(base.inputs, base, values)
    expected = base(base.inputs).shape
    if getattr(y, 'shape', None) != expected:
      raise ValueError(
        f'{type(self.adapter).__name__}.apply gave {_said(y)} on the layer {layer}; expected '
        f'an array {expected}.'
      )
    return y

  def next_key(self) -> jax.Array | None:
    """A fresh key in training, or one per expert; None in evaluation, or where nothing is drawn."""
    if getattr(self, 'deterministic', True):
      return None
    fold = jax.random.fold_in if self.rng_key.ndim == 0 else jax.vmap(jax.random.fold_in)
    key = fold(self.rng_key[...], self.rng_count[...])
    self.rng_count[...] += 1
    return key


def _said(y: Any) -> str:
  return f'an array {y.shape}' if hasattr(y, 'shape') else type(y).__name__


def part_of(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The leading part of that shape."""
  return array if array.shape == shape else array[tuple(slice(0, n) for n in shape)]


RESERVED = ('adapter', 'label', 'active', 'deterministic', 'rng_key', 'rng_count', 'name', 'read')
RESERVED += ('one',)


class FrozenKernel:
  """The `Base` of one call: the layer's own kernel, applied and read."""

  def __init__(self, view: _kernel.View, bare: jax.Array):
    self._view, self._dtype = view, bare.dtype
    self._bare = view.flatten(bare)
    self.inputs = view.enter(self._dtype)
    self.key: jax.Array | None = None

  @property
  def sizes(self) -> dict[str, int]:
    """{'in': n, 'out': m, 'taps': t} of the kernel."""
    return self._view.sizes

  @property
  def shape(self) -> tuple[int, int]:
    """(in, out)."""
    return self.sizes['in'], self.sizes['out']

  def bias(self) -> jax.Array:
    """The layer's bias [out]; zeros where it has none."""
    return self._view.bias().astype(self._dtype)

  def __call__(self, x: Any) -> jax.Array:
    """x [..., in] -> [..., out]; for the layer's own input, what the layer itself computes."""
    if x is self.inputs:
      return self._bare
    if isinstance(x, _kernel.Lazy):
      return x @ self.weight()
    held: Any = self._view.kernel.get_raw_value()
    if isinstance(held, _packed.Packed):
      return held.dot(x, _specs.use_specs(self._view.kernel))
    return _kernel.frozen_dot(x, self.weight())

  def weight(self) -> jax.Array:
    """The kernel [in, out]."""
    words = self._view.layout.words
    return _kernel.as_matrix(self._view.kernel[...], words).astype(self._dtype)

  def dropout(self, x: Any, rate: float | jax.Array) -> Any:
    """x with dropout in training; a lookup has no input to drop from."""
    if self.key is None or isinstance(x, _kernel.Lazy):
      return x
    return _adapter.dropped(x, rate, self.key)

  @property
  def batch(self) -> _batch.Batch | _batch.Everywhere:
    """The tokens of the rows, where the model offers them."""
    return _batch.offered(self._bare.shape[0])


@dataclasses.dataclass
class _OneBlock:
  """The `Base` of a block of rows of one expert, inside a vmap over the blocks."""

  inputs: jax.Array
  bare: jax.Array
  key: jax.Array | None
  group: jax.Array
  whole: FrozenKernel
  group_sizes: jax.Array
  blocks: _groups.Blocks

  @property
  def shape(self) -> tuple[int, int]:
    return self.whole.shape

  def __call__(self, x: jax.Array) -> jax.Array:
    if x is self.inputs:
      return self.bare
    kernels = self.whole.weight()
    return _groups.block_dot(x, kernels, self.group, self.group_sizes, self.blocks)

  def weight(self) -> jax.Array:
    return self.whole.weight()[self.group]

  def bias(self) -> jax.Array:
    return self.whole.bias()[self.group]

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    return x if self.key is None else _adapter.dropped(x, rate, self.key)

  @property
  def batch(self) -> _batch.Batch | _batch.Everywhere:
    raise ValueError('The rows of experts are sorted: they do not tell which tokens they are.')


def apply_by_expert(
  attached: Attached, base: FrozenKernel, values: _adapter.Values, group_sizes: jax.Array
) -> jax.Array:
  """`apply` on rows sorted by expert, each with its own arrays or those of all -> [rows, out]."""
  blocks = _groups.Blocks.of(group_sizes, base.inputs.shape[0])
  shared = {name for name, slot in attached.slots().items() if slot.shared or attached.one}
  own = {name: blocks.take(value) for name, value in values.items() if name not in shared}
  keys = None
  if base.key is not None:
    index = jnp.arange(blocks.group.shape[0])
    of_block = jnp.broadcast_to(base.key, index.shape) if attached.one else blocks.take(base.key)
    keys = jax.vmap(jax.random.fold_in)(of_block, index)

  def one(x: Any, bare: Any, group: Any, key: Any, arrays: dict[str, Any]) -> jax.Array:
    here = _OneBlock(x, bare, key, group, base, group_sizes, blocks)
    both = {name: values[name] if name in shared else arrays[name] for name in values}
    return attached.adapter.apply(x, here, _adapter.Values(both))

  x, bare = blocks.enter(base.inputs), blocks.enter(base(base.inputs))
  return blocks.leave(jax.vmap(one)(x, bare, blocks.group, keys, own))


class AdaptedLayer(nnx.Module):
  """Mixin of the classes that `adapted_class` makes: calls the layer through its adapters."""

  adapters: Any

  def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    forward = functools.partial(_call_without, self, args=args, kwargs=kwargs)
    active = [attached for attached in self.adapters if attached.active]
    if not active:
      return forward(inputs)
    found = _kernel.layer_type(self)
    assert found is not None
    if found.point:
      return apply_at_point(forward(inputs), active)
    groups = args[0] if _kernel.EXPERT in found.layout(self).words else None
    return apply_adapters(_kernel.View(self, forward, inputs, groups), active)


def _call_without(layer: Any, inputs: Any, *, args: tuple, kwargs: dict) -> jax.Array:
  return super(AdaptedLayer, layer).__call__(inputs, *args, **kwargs)


def apply_adapters(view: _kernel.View, active: list[Attached]) -> jax.Array:
  """The layer's output with the changes of its active adapters summed."""
  bare = view.bare()
  base = FrozenKernel(view, bare)
  y: jax.Array | None = None
  for attached in active:
    changed = attached.change(view, base)
    y = changed if y is None else y + (changed - base(base.inputs))
  assert y is not None
  return view.leave(_kernel.keep(y.astype(bare.dtype)), bare)


def apply_at_point(x: jax.Array, active: list[Attached]) -> jax.Array:
  """A sequence [batch, length, *features] behind the adapters of a point, one after the other."""
  size = _points.features(x.shape)
  y = x.reshape(*x.shape[:2], size)
  for attached in active:
    values = attached.values(y.dtype, {'in': size, 'out': size})
    base = _adapter.PointBase(size, attached.next_key())
    with _adapter.noted(attached.adapter, 'apply', f'a point, adapter {attached.name!r}'):
      made = attached.adapter.apply(y, base, values)
      if not hasattr(made, 'astype'):
        kind = type(attached.adapter).__name__
        raise ValueError(f'{kind}.apply gave {_said(made)} at a point; expected an array.')
      made = made.astype(y.dtype)
      _points.added(y, made)
    y = made
  return y.reshape(*y.shape[:2], *x.shape[2:])


def reads_batch(model: nnx.Module) -> bool:
  """Whether an active adapter of a model asks for the tokens of the batch."""
  return any(
    isinstance(node, Attached) and node.active and node.adapter.reads_batch
    for _, node in nnx.iter_graph(model)
  )


@functools.cache
def adapted_class(cls: type) -> type:
  """The class of layers of `cls` that carry adapters; one per class, so graphs compare equal."""
  return type(f'Adapted{cls.__name__}', (AdaptedLayer, cls), {'__module__': cls.__module__})


def plain_class(cls: type) -> type:
  """The class that `adapted_class` extended."""
  return cls.__mro__[2] if issubclass(cls, AdaptedLayer) else cls

"""A layer that carries adapters: what `attach` makes of a layer, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _kernel, _parts


@dataclasses.dataclass(frozen=True)
class Label:
  """A name that does not count when graphs are compared, so swapping names compiles nothing."""

  text: str = dataclasses.field(compare=False)


class Attached(nnx.Module):
  """One adapter at one layer: its arrays, one attribute per slot, and its rng if it draws."""

  def __init__(
    self,
    adapter: _adapter.Adapter,
    name: str,
    arrays: Mapping[str, _parts.AdapterParam],
    rng: tuple[nnx.RngKey, nnx.RngCount] | None = None,
  ):
    self.adapter = adapter
    self.label = Label(name)
    self.active = True
    self.deterministic = True
    for slot, variable in arrays.items():
      setattr(self, slot, variable)
    self.rng_key, self.rng_count = rng if rng else (None, None)

  @property
  def name(self) -> str:
    """The adapter's name."""
    return self.label.text

  def values(self, dtype: Any) -> _adapter.Values:
    """The slots' arrays in the dtype of the computation; no gradient reaches a frozen one."""
    arrays = {}
    for name in self.adapter.slots():
      variable = getattr(self, name)
      value = variable[...].astype(dtype)
      frozen = isinstance(variable, _parts.AdapterConstant)
      arrays[name] = jax.lax.stop_gradient(value) if frozen else _kernel.tall(value)
    return _adapter.Values(arrays)

  def next_key(self) -> jax.Array | None:
    """A fresh key in training, None in eval."""
    if self.deterministic or self.rng_key is None or self.rng_count is None:
      return None
    key = jax.random.fold_in(self.rng_key[...], self.rng_count[...])
    self.rng_count[...] += 1
    return key


RESERVED = ('adapter', 'label', 'active', 'deterministic', 'rng_key', 'rng_count', 'name', 'read')


class FrozenKernel:
  """The `Base` of one call: the layer's own kernel, applied and read."""

  def __init__(self, view: _kernel.View, bare: jax.Array):
    self._view, self._dtype = view, bare.dtype
    self._bare = view.flatten(bare)
    self.inputs = view.enter(self._dtype)
    self.key: jax.Array | None = None

  def __call__(self, x: Any) -> jax.Array:
    """x [..., in] -> [..., out]; for the layer's own input, what the layer itself computes."""
    if x is self.inputs:
      return self._bare
    if isinstance(x, _kernel.Lazy):
      return x @ self.weight()
    return _kernel.frozen_dot(x, self.weight())

  def weight(self) -> jax.Array:
    """The kernel [in, out]."""
    words = self._view.layout.words
    return _kernel.as_matrix(self._view.kernel[...], words).astype(self._dtype)

  def dropout(self, x: Any, rate: float | jax.Array) -> Any:
    """x with dropout in training; a lookup has no input to drop from."""
    if self.key is None or isinstance(x, _kernel.Lazy):
      return x
    keep = jax.random.bernoulli(self.key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


class AdaptedLayer(nnx.Module):
  """Mixin of the classes that `adapted_class` makes: calls the layer through its adapters."""

  adapters: Any

  def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    forward = functools.partial(_call_without, self, args=args, kwargs=kwargs)
    active = [attached for attached in self.adapters if attached.active]
    if not active:
      return forward(inputs)
    return apply_adapters(self, forward, inputs, active)


def _call_without(layer: Any, inputs: Any, *, args: tuple, kwargs: dict) -> jax.Array:
  return super(AdaptedLayer, layer).__call__(inputs, *args, **kwargs)


def apply_adapters(
  layer: Any, forward: Callable[[Any], jax.Array], inputs: Any, active: list[Attached]
) -> jax.Array:
  """The layer's output with the changes of its active adapters summed."""
  view = _kernel.View(layer, forward, inputs)
  bare = view.bare()
  base = FrozenKernel(view, bare)
  y: jax.Array | None = None
  for attached in active:
    base.key = attached.next_key()
    changed = attached.adapter.apply(base.inputs, base, attached.values(bare.dtype))
    y = changed if y is None else y + (changed - base(base.inputs))
  assert y is not None
  return view.leave(_kernel.keep(y.astype(bare.dtype)), bare)


@functools.cache
def adapted_class(cls: type) -> type:
  """The class of layers of `cls` that carry adapters; one per class, so graphs compare equal."""
  return type(f'Adapted{cls.__name__}', (AdaptedLayer, cls), {'__module__': cls.__module__})


def plain_class(cls: type) -> type:
  """The class that `adapted_class` extended."""
  return cls.__mro__[2] if issubclass(cls, AdaptedLayer) else cls

"""A layer of any registered type whose weight is quantized: how it is called."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _kernel, _layer, _packed, _parts, _specs


class QuantizedLayer(nnx.Module):
  """Mixin of the classes that `quantized_class` makes: multiplies with the codes."""

  def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """What the layer gives with its weight in numbers, up to rounding."""
    forward = functools.partial(_call_plain, self, args=args, kwargs=kwargs)
    view = _kernel.View(self, forward, inputs)
    held: Any = view.kernel.get_raw_value()
    if not isinstance(held, _packed.Packed):  # an adapter has put another kernel in its place
      return forward(inputs)
    if _kernel.EXPERT in view.layout.words:  # the kernels of all experts, decoded for this call
      with _kernel.swapped(self, {view.names.weight: held.dense()}):
        return forward(inputs)
    like: Any = _output(self, view, inputs, args, kwargs)
    x = view.enter(like.dtype)
    if isinstance(x, _kernel.Lazy):
      index, known = _looked_up(x)
      rows = held.rows(index, like.dtype)
      y = jnp.where(known[:, None], rows, jnp.asarray(jnp.nan, rows.dtype))
    else:
      y = _kernel.keep(held.dot(x, _specs.use_specs(view.kernel)))
    return view.leave(y, like)


def _call_plain(layer: Any, inputs: Any, *, args: tuple, kwargs: dict) -> jax.Array:
  return super(QuantizedLayer, layer).__call__(inputs, *args, **kwargs)


def _output(
  layer: nnx.Module, view: _kernel.View, inputs: Any, args: tuple, kwargs: dict
) -> jax.ShapeDtypeStruct:
  """Shape and dtype of what the layer gives, with a plain weight in the place of its own."""
  parts = _parts.split(layer)
  shape = jax.ShapeDtypeStruct(view.kernel.shape, view.kernel.dtype)
  parts = parts.replace(base=parts.base | {view.names.weight: shape})

  def call(parts: _parts.Parts, inputs: Any) -> jax.Array:
    return _call_plain(_parts.merge(parts), inputs, args=args, kwargs=kwargs)

  return jax.eval_shape(call, parts, inputs)


def _looked_up(lazy: _kernel.Lazy) -> tuple[jax.Array, jax.Array]:
  """(index [n] int of the row that each input of a lookup reads, whether there is such a row).

  The layer itself is run on a table whose rows are their own numbers, in three digits of base 256,
  which every dtype holds exactly.
  """
  number = jnp.arange(lazy.ins, dtype=jnp.int32)[:, None]
  places = jnp.asarray([[0, 8, 16]], jnp.int32)
  digits = lazy @ ((number >> places) & 255).astype(lazy.dtype)
  known = jnp.isfinite(digits).all(-1)
  whole = jnp.where(known[:, None], digits, jnp.zeros_like(digits)).astype(jnp.int32)
  return (whole << places).sum(-1), known


@functools.cache
def quantized_class(cls: type) -> type:
  """The class of layers of `cls` with a quantized weight; adapters stay outermost."""
  if issubclass(cls, _layer.AdaptedLayer):
    return _layer.adapted_class(quantized_class(_layer.plain_class(cls)))
  if issubclass(cls, QuantizedLayer):
    return cls
  return type(f'Quantized{cls.__name__}', (QuantizedLayer, cls), {'__module__': cls.__module__})


def dense_class(cls: type) -> type:
  """Inverse of `quantized_class`."""
  if issubclass(cls, _layer.AdaptedLayer):
    return _layer.adapted_class(dense_class(_layer.plain_class(cls)))
  return cls.__mro__[2] if issubclass(cls, QuantizedLayer) else cls

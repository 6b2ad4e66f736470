"""The product of an input and a quantized kernel, decoded as it is read, and its gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from peftlab import _padded
from peftlab.quant import quantizer


@dataclasses.dataclass(frozen=True)
class How:
  """What is static about a product.

  Attributes:
    quantizer: decodes.
    specs: (array, PartitionSpec) pairs: where the arrays are gathered to first, or None.
    over_tiles: whether the tiled dimensions are contracted, or the others.
  """

  quantizer: quantizer.Quantizer
  specs: tuple[tuple[str, Any], ...] | None
  over_tiles: bool


def tiles(chosen: quantizer.Quantizer, arrays: quantizer.Arrays, dtype: Any) -> jax.Array:
  """Held arrays of one layer -> [tiles, tile, *outs] in dtype."""
  return chosen.decode(_expanded(chosen, arrays), dtype)


def _expanded(chosen: quantizer.Quantizer, arrays: quantizer.Arrays) -> quantizer.Arrays:
  return chosen.expand(_padded.cut_tree(arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(how: How, x: jax.Array, arrays: quantizer.Arrays) -> jax.Array:
  """x [..., n] times a kernel -> [..., m] in the dtype of x.

  For the gradient the arrays alone are kept, and decoded again. A scale per output is left to the
  product's result, or to its input where outputs are contracted.
  """
  arrays = _expanded(how.quantizer, _gathered(arrays, how.specs))
  w, factor = how.quantizer.factors(arrays, x.dtype)
  factor = None if factor is None else factor.reshape((1,) * (x.ndim - 1) + (-1,))
  if factor is not None and not how.over_tiles:
    x = x * factor
  y = jax.lax.platform_dependent(
    x,
    w,
    cpu=functools.partial(_matrix_dot, over_tiles=how.over_tiles),
    default=functools.partial(_tiles_dot, over_tiles=how.over_tiles),
  )
  return y * factor if factor is not None and how.over_tiles else y


def _matrix_dot(x: jax.Array, w: jax.Array, *, over_tiles: bool) -> jax.Array:
  """x [..., n] times w [tiles, tile, *outs], decoded before and as a matrix.

  XLA's CPU backend fuses a decoding with what its product does to an operand: it would decode
  transposed, number by number; and it moves dimensions of which there are more than two.
  """
  w = jax.lax.optimization_barrier(w).reshape(w.shape[0] * w.shape[1], -1)
  return jax.lax.dot_general(x, w, (((x.ndim - 1,), (0 if over_tiles else 1,)), ((), ())))


def _tiles_dot(x: jax.Array, w: jax.Array, *, over_tiles: bool) -> jax.Array:
  """The same, in which both dimensions of inputs are contracted.

  A reshape would make the TPU compiler write the decoded kernel to memory, which it so fuses into
  the product.
  """
  ins, outs = (0, 1), tuple(range(2, w.ndim))
  over, kept = (ins, outs) if over_tiles else (outs, ins)
  lead = x.shape[:-1]
  x = x.reshape(*lead, *(w.shape[i] for i in over))
  own = tuple(range(len(lead), x.ndim))
  y = jax.lax.dot_general(x, w, ((own, over), ((), ())))
  return y.reshape(*lead, math.prod(w.shape[i] for i in kept))


def _forward(how: How, x: jax.Array, arrays: quantizer.Arrays) -> tuple[jax.Array, Any]:
  return product(how, x, arrays), arrays


def _backward(how: How, arrays: quantizer.Arrays, dy: jax.Array) -> tuple[jax.Array, None]:
  return product(dataclasses.replace(how, over_tiles=not how.over_tiles), dy, arrays), None


product.defvjp(_forward, _backward)


def _gathered(arrays: quantizer.Arrays, specs: Any) -> quantizer.Arrays:
  """The arrays held to where they are used: what travels between devices is codes, not numbers."""
  if specs is None:
    return arrays
  constrain = jax.lax.with_sharding_constraint
  return {name: constrain(arrays[name], spec) for name, spec in specs}

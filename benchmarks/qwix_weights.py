"""qwix's own path in peftlab's place for quantized weights: what the benchmarks compare with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from peftlab import _kernel, _packed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QwixWeight(_packed.Packed):
  """A weight [*stack, in, out] as qwix's codes and scales, multiplied by `qwix.dot_general`."""

  qvalue: Any
  scale: Any
  qtype: str = dataclasses.field(metadata={'static': True})
  own: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  words: tuple[str, ...] = dataclasses.field(metadata={'static': True})

  @classmethod
  def of(cls, weight: jax.Array, words: tuple[str, ...], qtype: Any, tile: int) -> QwixWeight:
    """A stacked weight [layers, *own], layer by layer."""

    def one(w: jax.Array) -> tuple[jax.Array, jax.Array]:
      tiled = {0: tile} if tile else {}
      made = qwix.quantize(
        _kernel.as_matrix(w, words), qtype, channelwise_axes=(1,), tiled_axes=tiled
      )
      return made.qvalue, made.scale

    qvalue, scale = jax.jit(lambda w: jax.lax.map(one, w))(weight)
    return cls(qvalue, scale, str(qtype), weight.shape[1:], words)

  @property
  def shape(self) -> tuple[int, ...]:
    """See `Packed.shape`."""
    return (*self.qvalue.shape[:-2], *self.own)

  @property
  def dtype(self) -> Any:
    """The dtype that the weight had."""
    return jnp.dtype(jnp.float32)

  @property
  def sharding(self) -> Any:
    """Where it lies."""
    return self.qvalue.sharding

  def leaf_axes(self, axes: tuple) -> Any:
    """See `Packed.leaf_axes`; on one device there are none."""
    raise NotImplementedError

  def _array(self, dtype: Any) -> qwix.QArray:
    qtype = self.qtype if self.qtype == 'nf4' else jnp.dtype(self.qtype)
    return qwix.QArray(self.qvalue, self.scale.astype(dtype), None, qtype)

  def matrix(self, dtype: Any = jnp.float32) -> jax.Array:
    """See `Packed.matrix`."""
    return qwix.dequantize(self._array(dtype))

  def dot(self, x: jax.Array, specs: Any = None) -> jax.Array:
    """See `Packed.dot`."""
    del specs
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return qwix.dot_general(x, self._array(x.dtype), dims)

  def rows(self, index: jax.Array, dtype: Any) -> jax.Array:
    """See `Packed.rows`; lookups stay plain here."""
    raise NotImplementedError

  def dense(self, dtype: Any = None) -> jax.Array:
    """See `Packed.dense`."""
    del dtype
    return jax.lax.map(lambda held: held.matrix().reshape(self.own), self)

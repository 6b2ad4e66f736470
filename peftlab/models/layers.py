"""The layers that hold weights: Dense, RMSNorm, Embedding. Each weight knows its logical axes."""

from __future__ import annotations

import math
import string
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _kernel


class Dense(nnx.Module):
  """A linear map over one or more dimensions: x [..., *in] -> y [..., *out].

  The kernel keeps its true dimensions, [embed, heads, head_dim] for a query projection, so that
  each has its own logical axis.

  Attributes:
    kernel: [*in, *out], with metadata `axes`, one name per dimension.
    bias: [*out] or None.
    in_dims: how many leading dimensions of the kernel are contracted.
    shape: of the kernel of one layer, without stack axes.
    role: attention, mlp, router or head: the word that names such layers in `where`.
  """

  def __init__(
    self,
    inputs: dict[str, int],
    outputs: dict[str, int],
    *,
    rngs: nnx.Rngs,
    bias: bool = False,
    dtype: Any = jnp.float32,
    role: str | None = None,
  ):
    """Random weights of variance 1 / in.

    Args:
      inputs: {logical axis: size} of the contracted dimensions, in order.
      outputs: likewise of the others.
      rngs: has the stream 'params'.
      bias: whether to add one, starting at 0.
      dtype: of the weights.
      role: what it is for, or None.
    """
    shape = (*inputs.values(), *outputs.values())
    deviation = math.prod(inputs.values()) ** -0.5
    values = jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(deviation, dtype)
    self.kernel = nnx.Param(values, axes=(*inputs, *outputs))
    zeros = jnp.zeros(tuple(outputs.values()), dtype)
    self.bias = nnx.Param(zeros, axes=tuple(outputs)) if bias else None
    self.in_dims = len(inputs)
    self.shape = shape
    self.role = role

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [..., *in] -> [..., *out], in the dtype of x."""
    contracted = (tuple(range(x.ndim - self.in_dims, x.ndim)), tuple(range(self.in_dims)))
    y = jax.lax.dot_general(x, self.kernel[...].astype(x.dtype), (contracted, ((), ())))
    y = _kernel.keep(y)
    return y if self.bias is None else add_bias(y, self.bias[...])


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
  """y [..., *out] + bias [*out], in the dtype of y."""
  return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def _dense_layout(layer: Any) -> _kernel.Layout:
  ins, ndim = layer.in_dims, len(layer.shape)
  kernel = string.ascii_letters[:ndim]

  def equation(x_ndim: int) -> tuple[str, str, str]:
    free = string.ascii_letters[ndim : ndim + x_ndim - ins]
    return free + kernel[:ins], kernel, free + kernel[ins:]

  words = ('in',) * ins + ('out',) * (ndim - ins)
  return _kernel.Layout(words=words, shape=layer.shape, equation=equation)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last dimension (Zhang & Sennrich 2019, eq. 4), in float32.

  Attributes:
    scale: [size]; the factor itself, or with `unit_offset` what is added to 1.
  """

  def __init__(
    self,
    size: int,
    *,
    eps: float,
    unit_offset: bool = False,
    dtype: Any = jnp.float32,
  ):
    start = jnp.zeros((size,), dtype) if unit_offset else jnp.ones((size,), dtype)
    self.scale = nnx.Param(start, axes=('norm',))
    self.eps = eps
    self.unit_offset = unit_offset

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [..., size] -> the same shape and dtype."""
    factor = self.scale[...].astype(jnp.float32) + (1.0 if self.unit_offset else 0.0)
    factor = factor.reshape((1,) * (x.ndim - 1) + factor.shape)
    return (unit_rms(x.astype(jnp.float32), self.eps) * factor).astype(x.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
  """x [..., size] / its root mean square over the last dimension, in float32; of x's dtype."""
  wide = x.astype(jnp.float32)
  rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * rms).astype(x.dtype)


class Embedding(nnx.Module):
  """A table of vectors, read by token, and used transposed as a tied head.

  Attributes:
    table: [vocab, embed].
  """

  def __init__(self, vocab: int, embed: int, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
    values = jax.random.normal(rngs.params(), (vocab, embed), dtype)
    values = values * jnp.asarray(embed**-0.5, dtype)
    self.table = nnx.Param(values, axes=('vocab', 'embed'))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Tokens [...] int -> [..., embed]; NaN for a token outside the vocabulary."""
    read = self.table[...].at[tokens]
    return read.get(mode='fill', fill_value=jnp.nan, wrap_negative_indices=False)

  def attend(self, x: jax.Array) -> jax.Array:
    """x [..., embed] -> logits [..., vocab]: x table^T."""
    contracted = ((x.ndim - 1,), (1,))
    return jax.lax.dot_general(x, self.table[...].astype(x.dtype), (contracted, ((), ())))


_kernel.register_layer(Dense, _dense_layout, check=False)
_kernel.register_norm(RMSNorm)
_kernel.register_layer(Embedding, 'in out', weight='table', bias=None, linear=False, check=False)

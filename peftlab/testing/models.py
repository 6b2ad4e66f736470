"""Tiny models for tests: a stack run by an applier, the same as a list, one of every layer type."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _stack, appliers

EVEN = (16, 24)  # divided by every axis of the meshes
ODD = (15, 21)  # divided by none
HALF = (15, 24)  # one dimension of each


class Block(nnx.Module):
  """x + down(tanh(up(x))), with biases and logical axes: a column- and a row-parallel layer."""

  def __init__(self, sizes: tuple[int, int] = EVEN, *, rngs: nnx.Rngs, dtype: Any = None):
    """Sizes are (embed, mlp); `dtype` is that of the activations, default the input's own."""
    embed, mlp = sizes
    normal = nnx.initializers.normal(0.5)
    options = dict(rngs=rngs, dtype=dtype, bias_init=normal)
    self.up = nnx.Linear(embed, mlp, **options, **_axes('embed', 'mlp'))
    self.down = nnx.Linear(mlp, embed, **options, **_axes('mlp', 'embed'))

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, embed] -> the same shape."""
    return x + self.down(jnp.tanh(self.up(x)))


def _axes(first: str, second: str) -> dict[str, Any]:
  return {'kernel_metadata': {'axes': (first, second)}, 'bias_metadata': {'axes': (second,)}}


class StackModel(nnx.Module):
  """Blocks kept in one stack and run by an applier."""

  def __init__(
    self,
    sizes: tuple[int, int] = EVEN,
    *,
    length: int = 2,
    axis: int = 0,
    applier: str | appliers.Applier = 'scan',
    dtype: Any = None,
    seed: int = 0,
  ):
    def make(rngs: nnx.Rngs) -> Block:
      return Block(sizes, rngs=rngs, dtype=dtype)

    self.layers = _stack.stack(make, length, rngs=seed, axis=axis)
    self.applier = appliers.get_applier(applier)

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, embed] -> the same shape."""
    x, self.layers = self.applier.run(self.layers, x, lambda layer, x: layer(x))
    return x


class ListModel(nnx.Module):
  """The same blocks with the same weights as modules of a list."""

  def __init__(self, sizes: tuple[int, int] = EVEN, *, length: int = 2, seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), length)
    self.layers = nnx.List([Block(sizes, rngs=nnx.Rngs(key)) for key in keys])

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, embed] -> the same shape."""
    for layer in self.layers:
      x = layer(x)
    return x


class ZooModel(nnx.Module):
  """One layer of every type that flax has for a weight, with biases and odd widths."""

  vocab = 11

  def __init__(self, times: int = 1, *, seed: int = 0):
    """Every width is multiplied by `times`."""
    options = dict(rngs=nnx.Rngs(seed), bias_init=nnx.initializers.normal(0.5))
    n = times
    self.embed = nnx.Embed(self.vocab * n, 15 * n, rngs=options['rngs'])
    self.conv = nnx.Conv(15 * n, 9 * n, kernel_size=(3,), **options)
    self.linear = nnx.Linear(9 * n, 21 * n, **options)
    self.general = nnx.LinearGeneral(21 * n, (3, 5 * n), **options)
    self.einsum = nnx.Einsum('...hd,hde->...e', (3, 5 * n, 15 * n), (15 * n,), **options)
    self.head = nnx.Linear(15 * n, 7 * n, **options)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Tokens [batch, length] int -> [batch, length, 7]."""
    x = self.linear(jnp.tanh(self.conv(self.embed(tokens))))
    return self.head(self.einsum(jnp.tanh(self.general(jnp.tanh(x)))))

"""Tiny models for tests: a stack run by an applier, the same as a list, one of every layer type."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _points, _stack, appliers

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


class PointBlock(nnx.Module):
  """x + out(attention over all tokens), with points of its keys and of its values."""

  def __init__(self, sizes: tuple[int, int] = EVEN, *, rngs: nnx.Rngs, dtype: Any = None):
    """Sizes are (embed, features of keys and values)."""
    embed, inner = sizes
    options = dict(rngs=rngs, dtype=dtype)
    self.q = nnx.Linear(embed, inner, **options, **_axes('embed', 'mlp'))
    self.k = nnx.Linear(embed, inner, **options, **_axes('embed', 'mlp'))
    self.v = nnx.Linear(embed, inner, **options, **_axes('embed', 'mlp'))
    self.out = nnx.Linear(inner, embed, **options, **_axes('mlp', 'embed'))
    self.keys = _points.Point('k', role='prefix')
    self.values = _points.Point('v', role='prefix')

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, length, embed] -> the same shape."""
    k, v = self.keys(self.k(x)), self.values(self.v(x))
    weights = jax.nn.softmax(jnp.einsum('bqd,bkd->bqk', self.q(x), k), axis=-1)
    return x + self.out(jnp.einsum('bqk,bkd->bqd', weights, v))


class PointModel(nnx.Module):
  """Such blocks behind a layer with a point, in a stack run by an applier or in a list."""

  def __init__(
    self,
    sizes: tuple[int, int] = EVEN,
    *,
    applier: str | appliers.Applier = 'scan',
    dtype: Any = None,
    listed: bool = False,
  ):
    embed, _ = sizes
    first = nnx.Rngs(1)
    self.first = nnx.Linear(embed, embed, rngs=first, dtype=dtype, **_axes('vocab', 'embed'))
    self.inputs = _points.Point('first', role='inputs')

    def make(rngs: nnx.Rngs) -> PointBlock:
      return PointBlock(sizes, rngs=rngs, dtype=dtype)

    if listed:
      self.layers = nnx.List([make(nnx.Rngs(k)) for k in jax.random.split(jax.random.key(0), 2)])
    else:
      self.layers = _stack.stack(make, 2, rngs=0)
    self.applier = appliers.get_applier(applier)

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, embed], texts of one token each -> the same shape."""
    y = self.inputs(self.first(x[:, None]))
    if isinstance(self.layers, nnx.List):
      for layer in self.layers:
        y = layer(y)
    else:
      y, self.layers = self.applier.run(self.layers, y, lambda layer, y: layer(y))
    return y[:, -1]


def point_sizes(role: str) -> list[tuple[int, int]]:
  """(features, layers) of every point of a role in a PointModel of `EVEN` sizes."""
  embed, inner = EVEN
  return {'inputs': [(embed, 1)], 'prefix': [(inner, 2), (inner, 2)]}.get(role, [])


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

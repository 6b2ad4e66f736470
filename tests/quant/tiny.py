"""A tiny stack of layers for the tests of quantization: column- and row-parallel, all kinds."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab import _batch, _specs, appliers
from peftlab.models.layers import Dense, Embedding

EMBED, HEADS, HEAD = 64, 4, 16


class Layer(nnx.Module):
  """x + o(silu(q(x))) + down(silu(up(x)))."""

  def __init__(self, rngs: nnx.Rngs):
    heads = {'q_heads': HEADS, 'head_dim': HEAD}
    self.q = Dense({'embed': EMBED}, heads, rngs=rngs, bias=True)
    self.o = Dense(heads, {'embed': EMBED}, rngs=rngs)
    axes = {'kernel_metadata': {'axes': ('embed', 'mlp')}, 'bias_metadata': {'axes': ('mlp',)}}
    self.up = nnx.Linear(EMBED, 96, rngs=rngs, **axes)
    self.down = nnx.Einsum('be,eh->bh', (96, EMBED), rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = _specs.constrain(x + self.o(jax.nn.silu(self.q(x))), ('batch', 'embed'))
    return _specs.constrain(x + self.down(jax.nn.silu(self.up(x))), ('batch', 'embed'))


def body(layer: Any, x: jax.Array) -> jax.Array:
  """Of the appliers; an adapter that asks what text a row is behind is told: behind any."""
  with _batch.offering(_batch.EVERYWHERE):
    return layer(x)


class Model(nnx.Module):
  """An embedding, three layers, the embedding as the head."""

  def __init__(self, seed: int = 0):
    rngs = nnx.Rngs(seed)
    self.embed = Embedding(48, EMBED, rngs=rngs)
    self.layers = peftlab.stack(Layer, 3, rngs=rngs)

  def __call__(self, tokens: jax.Array, applier: str = 'scan') -> jax.Array:
    x = self.embed(tokens)
    x, _ = appliers.get_applier(applier).run(self.layers, x, body)
    return self.embed.attend(x)


TOKENS = jnp.arange(8, dtype=jnp.int32) * 5


def loss(parts: Any, adapter: Any, applier: str = 'scan', base: Any = None) -> jax.Array:
  """A scalar of the outputs."""
  parts = parts.replace(adapter=adapter, base=parts.base if base is None else base)
  model: Any = peftlab.merge(parts)
  return (model(TOKENS, applier) ** 2).mean()


def spoiled(model: Any, value: float) -> Any:
  """The model with 3 numbers of the kernel of layers.o replaced."""
  parts = peftlab.split(model)
  kernel = np.array(parts.base['layers']['o']['kernel'])
  kernel[1, 2, :3, 5] = value
  layers = parts.base['layers'] | {'o': {'kernel': jnp.asarray(kernel)}}
  return peftlab.merge(parts.replace(base=parts.base | {'layers': layers}))


def randomized(parts: Any) -> Any:
  """The parts with random numbers in the trainable arrays of the adapter."""
  random = np.random.default_rng(3)

  def draw(array: jax.Array, moves: bool) -> jax.Array:
    if not (moves and jnp.issubdtype(array.dtype, jnp.floating)):
      return array
    noise = jnp.asarray(random.standard_normal(array.shape) * 0.05, array.dtype)
    return jax.device_put(array + noise, array.sharding)

  return parts.replace(adapter=jax.tree.map(draw, parts.adapter, peftlab.trainable(parts)))

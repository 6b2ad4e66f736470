"""The yardstick: the same decoder and LoRA step hand-written in plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any

PROJECTIONS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
SIZES = dict(
  layers=8, embed=512, heads=8, head_dim=64, mlp=1408, vocab=8192, batch=4, length=256,
  rank=8, alpha=16.0, eps=1e-5, theta=1e6,
)  # fmt: skip


def weights(sizes: dict[str, Any], seed: int = 0) -> Tree:
  """Random float32 weights: {'embed', 'head', 'norm', 'layers': {name: [layers, ...]}}."""
  rng = np.random.default_rng(seed)
  n, d, f, v = (sizes[k] for k in ('layers', 'embed', 'mlp', 'vocab'))
  h = sizes['heads'] * sizes['head_dim']

  def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-2] ** -0.5)

  shapes = dict(q=(d, h), k=(d, h), v=(d, h), o=(h, d), gate=(d, f), up=(d, f), down=(f, d))
  layers = {name: normal(n, *shape) for name, shape in shapes.items()}
  layers |= {name: np.ones((n, d), np.float32) for name in ('norm1', 'norm2')}
  return {
    'embed': normal(v, d) * np.float32(0.1),
    'head': normal(d, v),
    'norm': np.ones(d, np.float32),
    'layers': layers,
  }


def factors(sizes: dict[str, Any], layers: Tree, seed: int = 1) -> Tree:
  """LoRA factors: {name: {'a': [layers, in, rank], 'b': [layers, rank, out]}}; b is 0."""
  rng = np.random.default_rng(seed)
  made = {}
  for name in PROJECTIONS:
    n, i, o = layers[name].shape
    a = rng.standard_normal((n, i, sizes['rank']), dtype=np.float32) * np.float32((2 / i) ** 0.5)
    made[name] = {'a': a, 'b': np.zeros((n, sizes['rank'], o), np.float32)}
  return made


def tokens(sizes: dict[str, Any], seed: int = 2) -> np.ndarray:
  """[batch, length] random tokens."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, sizes['vocab'], (sizes['batch'], sizes['length']), dtype=np.int32)


def _rms(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def _rope(x: jax.Array, theta: float) -> jax.Array:
  length, dim = x.shape[1], x.shape[-1]
  frequency = theta ** (-2 * jnp.arange(dim // 2, dtype=jnp.float32) / dim)
  angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
  sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
  left, right = jnp.split(x, 2, -1)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def layer(sizes: dict[str, Any], x: jax.Array, w: Tree, lora: Tree) -> jax.Array:
  """One block: x [batch, length, embed] -> the same shape."""
  b, t, _ = x.shape
  h, d = sizes['heads'], sizes['head_dim']
  scale = sizes['alpha'] / sizes['rank']

  def linear(name: str, y: jax.Array) -> jax.Array:
    return y @ w[name] + ((y @ lora[name]['a']) @ lora[name]['b']) * scale

  y = _rms(x, w['norm1'], sizes['eps'])
  q = _rope(linear('q', y).reshape(b, t, h, d), sizes['theta']) * d**-0.5
  k = _rope(linear('k', y).reshape(b, t, h, d), sizes['theta'])
  v = linear('v', y).reshape(b, t, h, d)
  scores = jnp.einsum('bthd,bshd->bhts', q, k)
  mask = jnp.tril(jnp.ones((t, t), bool))
  scores = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
  y = jnp.einsum('bhts,bshd->bthd', scores, v).reshape(b, t, h * d)
  x = x + linear('o', y)
  y = _rms(x, w['norm2'], sizes['eps'])
  return x + linear('down', jax.nn.silu(linear('gate', y)) * linear('up', y))


def loss(
  sizes: dict[str, Any], base: Tree, lora: Tree, batch: jax.Array, *, scan: bool
) -> jax.Array:
  """Mean cross entropy of the next token."""
  x = base['embed'][batch]
  one = functools.partial(layer, sizes)
  if scan:
    x, _ = jax.lax.scan(lambda c, wl: (one(c, *wl), None), x, (base['layers'], lora))
  else:
    for w, factors_ in zip(base['layers'], lora, strict=True):
      x = one(x, w, factors_)
  logits = (_rms(x, base['norm'], sizes['eps']) @ base['head'])[:, :-1]
  return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1))


def unstack(tree: Tree, layers: int) -> list[Tree]:
  """Arrays [layers, ...] -> one tree per layer."""
  return [jax.tree.map(lambda a, i=i: a[i], tree) for i in range(layers)]


def make_step(
  sizes: dict[str, Any], optimizer: optax.GradientTransformation, *, scan: bool, like: Tree = None
) -> Any:
  """step(lora, opt_state, base, batch) -> (lora, opt_state, loss), the first two donated.

  Args:
    sizes: see SIZES.
    optimizer: updates the factors.
    scan: over stacked layers, or unrolled over a list of them.
    like: (lora, opt_state) whose shardings the results keep, on several devices.
  """

  def step(lora: Tree, state: Tree, base: Tree, batch: jax.Array) -> tuple:
    value, grads = jax.value_and_grad(lambda f: loss(sizes, base, f, batch, scan=scan))(lora)
    updates, state = optimizer.update(grads, state, lora)
    return optax.apply_updates(lora, updates), state, value

  keep = None if like is None else (*jax.tree.map(lambda a: a.sharding, like), None)
  return jax.jit(step, donate_argnums=(0, 1), out_shardings=keep)

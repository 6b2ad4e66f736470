"""Adapter types as people outside write them: each passes the suite with no test of its own."""

import dataclasses

import jax
import jax.numpy as jnp

import peftlab
from peftlab import Slot


def ones(key, shape, dtype):
  del key
  return jnp.ones(shape, dtype)


@peftlab.register_adapter('outside_scaling')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(peftlab.Adapter):
  """y = (x W) v: IA3 (Liu et al. 2022)."""

  def slots(self):
    return {'v': Slot(dims='out', init=ones)}

  def apply(self, x, base, p):
    return base(x) * p.v

  def fuse(self, w, p):
    return w * p.v


@peftlab.register_adapter('outside_input_scaling')
@dataclasses.dataclass(frozen=True, kw_only=True)
class InputScaling(peftlab.Adapter):
  """y = (x v) W: the input is scaled, so the kernel is applied to another x."""

  def slots(self):
    return {'v': Slot(dims='in', init=ones)}

  def apply(self, x, base, p):
    return base(x * p.v)

  def fuse(self, w, p):
    return p.v[:, None] * w


def column_norms(w):
  return jnp.sqrt(jnp.sum(jnp.square(w), axis=0) + 1e-6)


@peftlab.register_adapter('outside_magnitude')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Magnitude(peftlab.Adapter):
  """y = x (W + B A) m / |W + B A|: DoRA (Liu et al. 2024)."""

  rank: int = 4
  alpha: float = peftlab.initial(8.0)

  def slots(self):
    scale = peftlab.constant(self.alpha / self.rank)

    def norms(key, shape, dtype, w):
      del key, shape
      return column_norms(w).astype(dtype)

    return {
      'a': Slot(dims='in rank', init=jax.nn.initializers.he_uniform()),
      'b': Slot(dims='rank out'),
      'm': Slot(dims='out', init=norms, needs_weight=True),
      'scale': Slot(dims='', init=scale, trainable=False),
    }

  def apply(self, x, base, p):
    norm = column_norms(base.weight() + (p.a * p.scale) @ p.b)
    return (base(x) + (x @ p.a) @ p.b * p.scale) * (p.m / norm)

  def fuse(self, w, p):
    new = w + (p.a * p.scale) @ p.b
    return new * (p.m / column_norms(new))


@peftlab.register_adapter('outside_frozen_random')
@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenRandom(peftlab.Adapter):
  """y = x W + ((x A) d) B v with A, B frozen and random: VeRA (Kopiczko et al. 2023)."""

  rank: int = 4

  def slots(self):
    random = jax.nn.initializers.normal(0.5)
    return {
      'a': Slot(dims='in rank', init=random, trainable=False),
      'b': Slot(dims='rank out', init=random, trainable=False),
      'd': Slot(dims='rank', init=peftlab.constant(0.1)),
      'v': Slot(dims='out'),
    }

  def apply(self, x, base, p):
    return base(x) + (((x @ p.a) * p.d) @ p.b) * p.v

  def fuse(self, w, p):
    return w + ((p.a * p.d) @ p.b) * p.v


@peftlab.register_adapter('outside_principal')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Principal(peftlab.Adapter):
  """y = x W + x (A B - A0 B0): PiSSA (Meng et al. 2024) with the base as it was."""

  rank: int = 2

  def slots(self):
    def left(key, shape, dtype, w):
      del key, shape
      u, s, _ = jnp.linalg.svd(w, full_matrices=False)
      return (u * jnp.sqrt(s))[:, : self.rank].astype(dtype)

    def right(key, shape, dtype, w):
      del key, shape
      _, s, v = jnp.linalg.svd(w, full_matrices=False)
      return (jnp.sqrt(s)[:, None] * v)[: self.rank].astype(dtype)

    return {
      'a': Slot(dims='in rank', init=left, needs_weight=True),
      'b': Slot(dims='rank out', init=right, needs_weight=True),
      'a0': Slot(dims='in rank', init=left, needs_weight=True, trainable=False),
      'b0': Slot(dims='rank out', init=right, needs_weight=True, trainable=False),
    }

  def apply(self, x, base, p):
    return base(x) + (x @ p.a) @ p.b - (x @ p.a0) @ p.b0

  def fuse(self, w, p):
    return w + p.a @ p.b - p.a0 @ p.b0


@peftlab.register_adapter('outside_bias')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bias(peftlab.Adapter):
  """y = x W + v: BitFit. No kernel does that, and it says so."""

  mergeable = False

  def slots(self):
    return {'v': Slot(dims='out')}

  def apply(self, x, base, p):
    return base(x) + p.v


@peftlab.register_adapter('outside_gate')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate(peftlab.Adapter):
  """y = x W + x A tanh: written with einsum, nonlinear, not the base at start, no embeddings."""

  identity_at_start = False
  mergeable = False
  embeddings = False
  rank: int = 3
  dropout: float = 0.0

  def slots(self):
    random = jax.nn.initializers.normal(0.5)
    return {
      'a': Slot(dims='in rank', init=random, dtype=jnp.bfloat16),
      'b': Slot(dims='rank out', init=random),
    }

  def apply(self, x, base, p):
    hidden = jnp.einsum('...i,ir->...r', base.dropout(x, self.dropout), p.a)
    return base(x) + jnp.tanh(hidden) @ p.b

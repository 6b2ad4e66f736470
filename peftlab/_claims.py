"""What an adapter type says of itself, and what follows from its slots: a row of the table."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from peftlab import _adapter

SIZES = (48, 32)
RANK = 4
STATED = ('identity_at_start', 'mergeable', 'embeddings', 'norms', 'conv', 'experts')
STATED += ('quantized_base', 'mixed_batch')
OF_WEIGHTS = ('embeddings', 'norms', 'conv', 'experts')  # kinds of layers that have a weight


def small(cls: type[_adapter.Adapter], *, rank: int = RANK) -> _adapter.Adapter:
  """An instance for small kernels: the defaults and `small`, with that rank where it has one."""
  fields: dict[str, Any] = dict(cls.small)
  ranked = [f for f in dataclasses.fields(cls) if f.name == 'rank' and isinstance(f.default, int)]
  if ranked:
    fields['rank'] = rank
  return cls(**fields)


def row(adapter: _adapter.Adapter) -> dict[str, Any]:
  """{claim: bool, or words} of an instance.

  Besides the class variables: needs_weight (for first values, or in `apply`), shared (slots that
  the model has once), divides (quotients that must come out even), trainable (numbers on a linear
  layer 48 -> 32, or at a point of 32 features), goes_on ('weights', or points of a role).
  """
  slots = adapter.slots()
  stated: dict[str, Any] = {'goes_on': adapter.point or 'weights'}
  stated |= {n: getattr(adapter, n) and not (adapter.point and n in OF_WEIGHTS) for n in STATED}
  return stated | {
    'needs_weight': any(s.needs_weight for s in slots.values()) or reads_weight(adapter),
    'shared': any(s.shared for s in slots.values()),
    'divides': ', '.join(_adapter.divided(adapter)),
    'trainable': trainable(adapter, _sizes(adapter)),
  }


def _sizes(adapter: _adapter.Adapter) -> dict[str, int]:
  """Of the kernel, or the point, that a row of the table is about."""
  return {'in': SIZES[1] if adapter.point else SIZES[0], 'out': SIZES[1]}


def trainable(adapter: _adapter.Adapter, sizes: Mapping[str, int]) -> int:
  """Numbers that are trained at one kernel that has a bias, shared ones among them."""
  slots, shapes = _adapter.slots_at(adapter, sizes=sizes)
  return sum(math.prod(shapes[n]) for n, slot in slots.items() if slot.trainable)


def reads_weight(adapter: _adapter.Adapter) -> bool:
  """Whether `apply` asks for the kernel itself."""
  if adapter.point:
    return False
  slots, shapes = _adapter.slots_at(adapter, sizes={'in': SIZES[0], 'out': SIZES[1]})
  found = []

  def run(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    base = _adapter.PlainBase(w)
    y = adapter.apply(x, base, _adapter.Values(arrays))
    found.append(base.read)
    return y

  def shape(name: str) -> jax.ShapeDtypeStruct:
    inexact = jnp.issubdtype(slots[name].dtype, jnp.inexact)
    return jax.ShapeDtypeStruct(shapes[name], jnp.float32 if inexact else slots[name].dtype)

  arrays = {name: shape(name) for name, slot in slots.items() if not slot.aside}
  x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, SIZES[0]), SIZES))
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
    jax.eval_shape(run, x, w, arrays)
  return found[0]

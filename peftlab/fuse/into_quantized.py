"""An adapter into a quantized base that stays quantized: what it costs is measured and told."""

from __future__ import annotations

import dataclasses
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _attach, _sites
from peftlab.fuse import into_weights
from peftlab.quant import convert, encoding, quantized

SWALLOWED = 0.5  # of the delta's size: an error above it leaves little of the fine-tuning
ROUNDING = 1e-6  # of the kernel's size: what float32 makes of a delta of 0


def fuse_quantized(
  model: nnx.Module, *, name: str = 'default'
) -> tuple[nnx.Module, dict[str, float]]:
  """A quantized model with one adapter merged in and taken off, its kernels quantized again.

  Rounding W + D to codes loses up to half a step, and a step is often larger than the whole delta
  D. The error is measured for each kernel and warned about; to keep the delta exactly, `fuse`
  gives kernels in numbers. A kernel that the adapter leaves as it is, as a fresh one does, keeps
  its arrays, the very objects.

  Args:
    model: is not touched.
    name: of the adapter.

  Returns:
    The model, and {layer: ||round(W + D) - W - D|| / ||D||} over all layers of a stack; 0 where
    the kernel is left as it is.

  Raises:
    ValueError: see `fuse`; or no kernel with this adapter is quantized.
  """
  _attach.require(model, name)
  before = {
    s.path: s.weight.get_raw_value()
    for s in _sites.sites(model)
    if isinstance(s.weight.get_raw_value(), quantized.Quantized)
    and any(a.name == name for a in getattr(s.layer, 'adapters', ()))
  }
  if not before:
    raise ValueError(f'No kernel with the adapter {name!r} is quantized; use peftlab.fuse.')
  fused = into_weights.fuse(model, name=name)
  errors = {}
  plans = [_again(s, before[s.path]) for s in _sites.sites(fused) if s.path in before]
  result, _ = convert.carry_out(fused, plans)
  after = {s.path: s.weight.get_raw_value() for s in _sites.sites(result)}
  for plan in plans:
    path, exact = plan.site.path, plan.site.weight.get_raw_value()
    kept = plan.value is not None
    errors[plan.site.name] = 0.0 if kept else _lost(exact, before[path], after[path])
  low = [f'{n} ({e:.0%})' for n, e in errors.items() if e > SWALLOWED]
  if low:
    shown = ', '.join(low[:6]) + (f' and {len(low) - 6} more' if len(low) > 6 else '')
    warnings.warn(
      f'Merging {name!r} into quantized kernels loses this much of its change: {shown}. The steps '
      'of the codes are too large for it; peftlab.fuse keeps it, in kernels of 16 or 32 bits.',
      stacklevel=2,
    )
  return result, errors


def _again(site: _sites.Site, held: quantized.Quantized) -> convert.Plan:
  """The plan that quantizes a fused kernel as the one before it was."""
  chosen = held.form.quantizer
  plan = convert.plan_site(site, chosen, None)
  if _same(site.weight.get_raw_value(), held):
    return dataclasses.replace(plan, value=held)
  try:
    encoding.shapes(plan.form)
  except ValueError as error:
    raise ValueError(f'{site.name} cannot be quantized again: {error}') from None
  return plan


def _same(fused: jax.Array, held: quantized.Quantized) -> bool:
  """Whether a fused kernel is the one before it, but for the rounding of the arithmetic."""
  plain = held.dense(jnp.float32).astype(fused.dtype)  # as `fuse` decodes and rounds it

  @jax.jit
  def sizes(fused: jax.Array, plain: jax.Array) -> tuple[jax.Array, jax.Array]:
    fused, plain = fused.astype(jnp.float32), plain.astype(jnp.float32)
    return ((fused - plain) ** 2).sum(), (plain**2).sum()

  delta, whole = sizes(fused, plain)
  return float(delta) <= ROUNDING**2 * float(whole)


def _lost(fused: Any, before: quantized.Quantized, after: quantized.Quantized) -> float:
  count = len(before.stack)

  def one(three: tuple) -> tuple[jax.Array, jax.Array]:
    exact, old, new = three
    exact = old.form.to_tiles(exact).astype(jnp.float32)
    lost, delta = new.tiles(jnp.float32) - exact, exact - old.tiles(jnp.float32)
    return (lost * lost).sum(), (delta * delta).sum()

  lost, delta = jax.jit(quantized.over_stack(count, one))((fused, before, after))
  size = float(jnp.sqrt(delta.sum()))
  return float(jnp.sqrt(lost.sum())) / size if size else 0.0

"""An adapter into a quantized base that stays quantized: what it costs is measured and told."""

from __future__ import annotations

from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _attach, _sites
from peftlab.fuse import into_weights
from peftlab.quant import convert, encoding, quantized

SWALLOWED = 0.5  # of the delta's size: an error above it leaves little of the fine-tuning


def fuse_quantized(
  model: nnx.Module, *, name: str = 'default'
) -> tuple[nnx.Module, dict[str, float]]:
  """A quantized model with one adapter merged in and taken off, its kernels quantized again.

  Rounding W + D to codes loses up to half a step, and a step is often larger than the whole delta
  D. The error is measured for each kernel and warned about; to keep the delta exactly, `fuse`
  gives kernels in numbers.

  Args:
    model: is not touched.
    name: of the adapter.

  Returns:
    The model, and {layer: ||round(W + D) - W - D|| / ||D||} over all layers of a stack.

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
    path = plan.site.path
    errors[plan.site.name] = _lost(plan.site.weight.get_raw_value(), before[path], after[path])
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
  try:
    encoding.shapes(plan.form)
  except ValueError as error:
    raise ValueError(f'{site.name} cannot be quantized again: {error}') from None
  return plan


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

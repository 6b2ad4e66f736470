"""LoftQ: LoRA that starts from what quantization lost (Li et al. 2023, arXiv:2310.08659)."""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

import peftlab
from peftlab import fuse
from peftlab.plugins import lora, pissa


@peftlab.register_adapter('loftq')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoftQ(lora.LowRank):
  """y = x Q + s x A B, s A B the best rank-r part of W - Q at the start. Trainable: as LoRA.

  Attached to a quantized base it is Algorithm 1 of one step: the codes Q are those of W and are
  never written again. Give `attach(..., full=model)` the model as it was before it was quantized;
  without it nothing is lost, and it starts as LoRA. `start_from` does more steps, which give codes
  of their own.
  """

  def slots(self):
    made = dict(init=peftlab.together, needs_weight=True)
    return {
      'a': peftlab.Slot(dims='in rank', **made),
      'b': peftlab.Slot(dims='rank out', **made),
      'scale': super().slots()['scale'],
    }

  def start(self, key, sizes, weight=None, full=None):
    del sizes
    assert full is not None  # both come with needs_weight
    assert weight is not None
    error = full - weight
    lost = jnp.linalg.norm(error) > 1e-5 * jnp.linalg.norm(weight)
    a, b = pissa.best(error, rank=self.rank, scale=self.scale)
    return {
      'a': jnp.where(lost, a, lora.INITS['he_uniform'](key, a.shape, a.dtype)),
      'b': jnp.where(lost, b, jnp.zeros_like(b)),
    }


def start_from(
  model: nnx.Module,
  adapter: LoftQ,
  quantizer: Any = 'nf4',
  *,
  iterations: int = 5,
  where: Any = 'all-linear',
  exclude: Any = (),
  tile: Any = None,
  name: str = 'default',
  **options: Any,
) -> tuple[nnx.Module, Any]:
  """`quantize` and `attach` in turns (Algorithm 1): Q = q(W - s A B), then s A B from W - Q.

  The base that it gives has codes of its own, made for this adapter: others that are to share it
  are attached to the result. One turn gives the codes of W.

  Args:
    model: in full precision; it is not changed.
    adapter: of any rank.
    quantizer: as of `peftlab.quantize`.
    iterations: turns, the T of the paper.
    where: which layers are quantized and adapted, see `peftlab.attach`.
    exclude: likewise.
    tile: as of `peftlab.quantize`.
    name: of the adapter.
    **options: of `attach`.

  Raises:
    ValueError: iterations below 1, or what `quantize` and `attach` raise.
  """
  if iterations < 1:
    raise ValueError(f'iterations is {iterations}; it must be at least 1.')
  layers = {'where': where, 'exclude': exclude}

  def turn(rest: nnx.Module) -> tuple[nnx.Module, Any]:
    held, _ = peftlab.quantize(rest, quantizer, tile=tile, **layers)
    return peftlab.attach(held, adapter, full=model, name=name, **layers, **options)

  made, report = turn(model)
  for _ in range(iterations - 1):
    made, report = turn(_without(model, made, adapter, name=name, **layers))
  return made, report


def _without(model: nnx.Module, made: nnx.Module, adapter: LoftQ, **options: Any) -> nnx.Module:
  """The model with W - s A B in place of each W, of the A and B that `made` has."""
  like, _ = peftlab.attach(model, adapter, **options)
  taken = jax.tree.map_with_path(
    lambda path, value: -value if path[-1].key == 'scale' else value, peftlab.split(made).adapter
  )
  return fuse.fuse(peftlab.merge(peftlab.split(like).replace(adapter=taken)), name=options['name'])

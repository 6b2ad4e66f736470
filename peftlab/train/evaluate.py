"""Held-out loss: nats per token that counts, over fixed batches."""

from __future__ import annotations

from collections.abc import Iterable
import functools
from typing import Any

from flax import nnx
import jax
import numpy as np

from peftlab import _parts
from peftlab.train import loss


def held_out_loss(parts: _parts.Parts, batches: Iterable[loss.Batch]) -> float:
  """The mean loss over all tokens that count in some batches, in nats.

  Raises:
    ValueError: no token counts in any of them.
  """
  totals = [_totals(parts.graph)(parts.adapter, parts.base, parts.state, b) for b in batches]
  total, count = (float(np.sum([t[i] for t in totals], dtype=np.float64)) for i in range(2))
  if not count:
    raise ValueError('The held-out batches have no token that counts in the loss.')
  return total / count


@functools.lru_cache(maxsize=64)
def _totals(graph: nnx.GraphDef) -> Any:
  """(adapter, base, state, batch) -> (summed loss, tokens); one program per graph."""

  @jax.jit
  def totals(adapter: Any, base: Any, state: Any, batch: loss.Batch) -> tuple[jax.Array, jax.Array]:
    parts = _parts.Parts(graph, adapter, base, state)
    return loss.summed_loss(parts, batch)[0], loss.count_tokens(batch)

  return totals

"""PiSSA: LoRA from the largest singular directions (Meng et al. 2024, arXiv:2404.02948)."""

import dataclasses

import jax.numpy as jnp

import peftlab
from peftlab.plugins import lora


@peftlab.register_adapter('pissa')
@dataclasses.dataclass(frozen=True, kw_only=True)
class PiSSA(lora.LowRank):
  """y = x W + s (x A B - x A0 B0), s A0 B0 the best rank-r part of W. Trainable: rank (in + out).

  The base is never rewritten: where PiSSA takes s A0 B0 out of W, it is subtracted at each call.
  """

  def slots(self):
    made = dict(init=peftlab.together, needs_weight=True)
    return {
      'a': peftlab.Slot(dims='in rank', **made),
      'b': peftlab.Slot(dims='rank out', **made),
      'a0': peftlab.Slot(dims='in rank', **made, trainable=False),
      'b0': peftlab.Slot(dims='rank out', **made, trainable=False),
      'scale': super().slots()['scale'],
    }

  def start(self, key, sizes, weight=None, full=None):
    del key, sizes, full
    a, b = self.first(weight)
    return {'a': a, 'b': b, 'a0': a, 'b0': b}

  def first(self, weight):
    """(A0 [in, rank], B0 [rank, out]) of a kernel."""
    u, s, vt = jnp.linalg.svd(weight, full_matrices=False)
    root = jnp.sqrt(s[: self.rank] / self.scale)
    return padded(u[:, : self.rank] * root, 1, self.rank), padded(
      root[:, None] * vt[: self.rank], 0, self.rank
    )

  def apply(self, x, base, p):
    dropped = base.dropout(x, self.dropout)
    return base(x) + ((dropped @ p.a) @ p.b - (dropped @ p.a0) @ p.b0) * p.scale

  def fuse(self, w, p):
    return w + (p.a @ p.b - p.a0 @ p.b0) * p.scale


def padded(m, axis, rank):
  """A matrix with zeros up to the rank, where that is above full rank."""
  widths = [(0, 0), (0, 0)]
  widths[axis] = (0, rank - m.shape[axis])
  return jnp.pad(m, widths)

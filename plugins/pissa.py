"""PiSSA: LoRA from the largest singular directions (Meng et al. 2024, arXiv:2404.02948)."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab.plugins import lora


def _packed(fields: dict[str, Any], slots: dict) -> tuple[dict[str, Any], dict]:
  """The LoRA of twice the rank that is the same: [A, A0] and [B; -B0], of the same scale."""
  grown = 2**0.5 if fields['rslora'] else 2
  fields = fields | {'rank': 2 * fields['rank'], 'alpha': fields['alpha'] * grown}
  if not slots:
    return fields, slots
  a, b = np.concatenate([slots['a'], slots['a0']], 1), np.concatenate([slots['b'], -slots['b0']])
  return fields, {'a': a, 'b': b, 'scale': slots['scale']}


def _unpacked(fields: dict[str, Any], slots: dict) -> tuple[dict[str, Any], dict]:
  """Inverse of `_packed`."""
  grown, rank = 2**0.5 if fields['rslora'] else 2, fields['rank'] // 2
  fields = fields | {'rank': rank, 'alpha': fields['alpha'] / grown}
  if not slots:
    return fields, slots
  first = {'a': slots['a'][:, :rank], 'b': slots['b'][:rank], 'scale': slots['scale']}
  return fields, first | {'a0': slots['a'][:, rank:], 'b0': -slots['b'][rank:]}


@peftlab.register_adapter('pissa')
@dataclasses.dataclass(frozen=True, kw_only=True)
class PiSSA(lora.LowRank):
  """y = x W + s (x A B - x A0 B0), s A0 B0 the best rank-r part of W. Trainable: rank (in + out).

  The base is never rewritten: where PiSSA takes s A0 B0 out of W, it is subtracted at each call.
  """

  peft = dataclasses.replace(lora.FORM, pack=_packed, unpack=_unpacked, padded=())

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
    return best(weight, rank=self.rank, scale=self.scale)

  def apply(self, x, base, p):
    dropped = base.dropout(x, self.dropout)
    return base(x) + ((dropped @ p.a) @ p.b - (dropped @ p.a0) @ p.b0) * p.scale

  def fuse(self, w, p):
    return w + (p.a @ p.b - p.a0 @ p.b0) * p.scale


def best(m, *, rank, scale):
  """(A [in, rank], B [rank, out]), of equal norms, with scale A B the best part of a matrix.

  Raises:
    ValueError: the scale is 0, by which nothing can be divided.
  """
  if not scale:
    raise ValueError('alpha is 0; a start from a matrix needs another scale.')
  u, s, vt = jnp.linalg.svd(m, full_matrices=False)
  root = jnp.sqrt(s[:rank] / abs(scale))
  a, b = u[:, :rank] * root, root[:, None] * vt[:rank] * math.copysign(1.0, scale)
  return padded(a, 1, rank), padded(b, 0, rank)


def padded(m, axis, rank):
  """A matrix with zeros up to the rank, where that is above full rank."""
  widths = [(0, 0), (0, 0)]
  widths[axis] = (0, rank - m.shape[axis])
  return jnp.pad(m, widths)

"""LoftQ: LoRA that starts from what quantization lost (Li et al. 2023, arXiv:2310.08659)."""

import dataclasses

import jax.numpy as jnp

import peftlab
from peftlab.plugins import lora, pissa


@peftlab.register_adapter('loftq')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoftQ(lora.LowRank):
  """y = x Q + s x A B, s A B the best rank-r part of W - Q at the start. Trainable: as LoRA.

  Algorithm 1 after its first step: the codes Q are those of W and are never written again. Give
  `attach(..., full=model)` the model as it was before it was quantized; without it nothing is lost,
  and it starts as LoRA. A otherwise starts orthonormal.
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
    u, s, vt = jnp.linalg.svd(error, full_matrices=False)
    a = pissa.padded(u[:, : self.rank], 1, self.rank)
    b = pissa.padded(s[: self.rank, None] * vt[: self.rank] / self.scale, 0, self.rank)
    return {
      'a': jnp.where(lost, a, lora.INITS['he_uniform'](key, a.shape, a.dtype)),
      'b': jnp.where(lost, b, jnp.zeros_like(b)),
    }

"""OLoRA: LoRA that starts from a QR decomposition (Büyükakyüz 2024, arXiv:2406.01775)."""

import dataclasses

import jax.numpy as jnp

import peftlab
from peftlab.plugins import pissa


@peftlab.register_adapter('olora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class OLoRA(pissa.PiSSA):
  """y = x W + s (x A B - x A0 B0), W^T = Q R, B0^T = Q[:, :r], A0^T = R[:r]. Trainable: as LoRA."""

  def first(self, weight):
    q, r = jnp.linalg.qr(weight.T)
    return pissa.padded(r[: self.rank].T, 1, self.rank), pissa.padded(
      q[:, : self.rank].T, 0, self.rank
    )

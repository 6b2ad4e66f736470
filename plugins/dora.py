"""DoRA: magnitude and direction of each column apart (Liu et al. 2024, arXiv:2402.09353)."""

import dataclasses

import jax
import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Tensor
from peftlab.plugins import lora


def column_norms(key: jax.Array, shape: tuple, dtype: jax.typing.DTypeLike, weight: jax.Array):
  """Init: the norm of each column of the kernel."""
  del key, shape
  return jnp.linalg.norm(weight, axis=0).astype(dtype)


@peftlab.register_adapter('dora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoRA(lora.LowRank):
  """y = x V m / |V| by columns, V = W + s A B. Trainable: rank (in + out) + out per kernel.

  Eq. 5; |V| is held constant in the gradient (section 4.3). No V is made: with |W| kept, |V|^2
  takes three thin products.
  """

  additive = False
  peft = dataclasses.replace(
    lora.FORM,
    marks={'use_dora': True},
    fixed={key: v for key, v in lora.FORM.fixed.items() if key != 'use_dora'},
    tensors=(*lora.FORM.tensors, Tensor('magnitude', 'lora_magnitude_vector', 'out -> out')),
  )

  def slots(self):
    return super().slots() | {
      'magnitude': peftlab.Slot(dims='out', init=column_norms, needs_weight=True),
      'norm': peftlab.Slot(
        dims='out', init=column_norms, needs_weight=True, trainable=False, saved=False
      ),
    }

  def apply(self, x, base, p):
    y = super().apply(x, base, p)
    return y * (p.magnitude / self._norms(base, p)).astype(y.dtype)

  def _norms(self, base, p):
    """|V| of each column, float32."""
    a, b, scale, norm = (
      jax.lax.stop_gradient(v).astype(jnp.float32) for v in (p.a, p.b, p.scale, p.norm)
    )
    crossed = jax.lax.stop_gradient(p.a.T @ base.weight()).astype(jnp.float32)
    squares = 2 * scale * (crossed * b).sum(0) + scale**2 * ((a.T @ a @ b) * b).sum(0)
    tiny = jnp.finfo(jnp.float32).tiny
    return jnp.sqrt(jnp.maximum(norm**2 + squares, tiny))

  def fuse(self, w, p):
    v = super().fuse(w, p)
    return v * (p.magnitude / jnp.linalg.norm(v, axis=0))

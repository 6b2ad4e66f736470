"""FourierFT: a few coefficients of the change's spectrum (Gao et al. 2024, arXiv:2405.03003)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial


@peftlab.register_adapter('fourierft')
@dataclasses.dataclass(frozen=True, kw_only=True)
class FourierFT(peftlab.Adapter):
  """y = x (W + s Re(ifft2 F)), F zero but for real entries. Trainable: `entries` per kernel.

  Attributes:
    entries: of the spectrum, at random places, the same in layers of one shape.
    alpha: the scale s; ifft2 divides by in x out.
    seed: of the places.
  """

  small: ClassVar = {'entries': 20}

  entries: int = 1000
  alpha: float = initial(150.0)
  seed: int = initial(777)

  def sizes(self, ins, outs):
    if self.entries > ins * outs:
      raise ValueError(f'FourierFT.entries is {self.entries}; a kernel here has {ins * outs}.')
    return {}

  def slots(self):
    places = peftlab.Slot(dims='2 entries', init=peftlab.together, trainable=False, dtype=jnp.int32)
    return {
      'spectrum': peftlab.Slot(dims='entries'),
      'places': places,
      'scale': peftlab.Slot(dims='', init=peftlab.constant(self.alpha), trainable=False),
    }

  def start(self, key, sizes, weight=None, full=None):
    del key, weight, full
    seed = jax.random.key(self.seed)
    flat = jax.random.choice(seed, sizes[0] * sizes[1], (self.entries,), replace=False)
    return {'places': jnp.stack([flat // sizes[1], flat % sizes[1]])}

  def apply(self, x, base, p):
    return base(x) + x @ self._delta(base.shape, p)

  def fuse(self, w, p):
    return w + self._delta(w.shape, p)

  def _delta(self, shape, p):
    values = p.spectrum.astype(jnp.float32)
    whole = jnp.zeros(shape, jnp.float32).at[p.places[0], p.places[1]].add(values)
    delta = jnp.fft.ifft2(whole).real
    return delta.astype(p.spectrum.dtype) * p.scale

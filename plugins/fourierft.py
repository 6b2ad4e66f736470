"""FourierFT: a few coefficients of the change's spectrum (Gao et al. 2024, arXiv:2405.03003)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab import initial
from peftlab.formats.peft_form import Key, PeftForm, Tensor


def places(entries: int, sizes: tuple[int, int], seed: int) -> np.ndarray:
  """[2, entries] int32: the first of a permutation of a kernel's places, (in, out).

  They are those that PEFT draws, which its folders do not hold: Fisher-Yates with the numbers of
  MT19937 over a kernel [out, in].
  """
  total = sizes[0] * sizes[1]
  kind = '<u4' if total < (2**32 - 1) // 20 else '>u8'
  width = int(kind[-1])
  held = np.random.RandomState(seed).bytes(width * entries)
  if width > 4:  # two numbers each, the higher half first
    held = np.frombuffer(held, '<u4').astype('>u4').tobytes()
  moved: dict[int, int] = {}
  chosen = np.zeros(entries, np.int64)
  for i, number in enumerate(np.frombuffer(held, kind)):
    at = i + int(number) % (total - i) if i < total - 1 else i
    chosen[i] = moved.get(at, at)
    moved[at] = moved.get(i, i)
  return np.stack([chosen % sizes[0], chosen // sizes[0]]).astype(np.int32)


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
  peft = PeftForm(
    type='FOURIERFT',
    keys={
      'entries': Key(name='n_frequency', default=1000, least=1, pattern='n_frequency_pattern'),
      'alpha': Key(name='scaling', default=150.0),
      'seed': Key(name='random_loc_seed', default=777, least=0),
    },
    tensors=(Tensor('spectrum', 'fourierft_spectrum', 'entries -> entries', on=('linear',)),),
    scale=('alpha', 'scale'),
    neutral=('init_weights',),
    made=lambda fields, sizes: {'places': places(fields['entries'], sizes, fields['seed'])},
  )

  entries: int = 1000
  alpha: float = initial(150.0)
  seed: int = initial(777)

  def sizes(self, kernel):
    numbers = kernel['in'] * kernel['out']
    if self.entries > numbers:
      raise ValueError(f'FourierFT.entries is {self.entries}; a kernel here has {numbers}.')
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
    return {'places': jnp.asarray(places(self.entries, sizes, self.seed))}

  def apply(self, x, base, p):
    return base(x) + x @ self._delta(base.shape, p)

  def fuse(self, w, p):
    return w + self._delta(w.shape, p)

  def _delta(self, shape, p):
    values = p.spectrum.astype(jnp.float32)
    whole = jnp.zeros(shape, jnp.float32).at[p.places[0], p.places[1]].add(values)
    delta = jnp.fft.ifft2(whole).real
    return delta.astype(p.spectrum.dtype) * p.scale

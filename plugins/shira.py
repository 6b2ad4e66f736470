"""SHiRA: a few numbers of the kernel are trained (Bhardwaj et al. 2024, arXiv:2406.13175)."""

import dataclasses

import jax
import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor


@peftlab.register_adapter('shira')
@dataclasses.dataclass(frozen=True, kw_only=True)
class SHiRA(peftlab.Adapter):
  """y = x (W + S), S zero but at random places. Trainable: rank (in + out) per kernel.

  Attributes:
    rank: as many numbers as a LoRA of that rank has, at most all.
  """

  peft = PeftForm(
    type='SHIRA',
    keys={'rank': Key(name='r', default=32, least=1)},
    tensors=(
      Tensor('numbers', 'shira_weight', 'entries -> entries', on=('linear',)),
      # PEFT's places are (out, in), ours (in, out).
      Tensor(
        'places',
        'shira_indices',
        'two entries -> two entries',
        on=('linear',),
        turned=True,
        integer=True,
      ),
    ),
    neutral=('init_weights', 'mask_type', 'random_seed'),
  )

  rank: int = 8

  def sizes(self, kernel):
    return {'entries': self._entries(kernel['in'], kernel['out'])}

  def slots(self):
    places = peftlab.Slot(dims='2 entries', init=peftlab.together, trainable=False, dtype=jnp.int32)
    return {'numbers': peftlab.Slot(dims='entries'), 'places': places}

  def start(self, key, sizes, weight=None, full=None):
    del weight, full
    entries = self._entries(*sizes)
    flat = jnp.sort(jax.random.choice(key, sizes[0] * sizes[1], (entries,), replace=False))
    return {'places': jnp.stack([flat // sizes[1], flat % sizes[1]])}

  def apply(self, x, base, p):
    return base(x) + x @ self._sparse(base.shape, p)

  def fuse(self, w, p):
    return w + self._sparse(w.shape, p)

  def _entries(self, ins, outs):
    return min(self.rank * (ins + outs), ins * outs)

  def _sparse(self, shape, p):
    return jnp.zeros(shape, p.numbers.dtype).at[p.places[0], p.places[1]].add(p.numbers)

"""VeRA: frozen random factors for all layers, vectors for each (Kopiczko et al. 2023)."""

import dataclasses

import jax

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor


@peftlab.register_adapter('vera')
@dataclasses.dataclass(frozen=True, kw_only=True)
class VeRA(peftlab.Adapter):
  """y = x W + ((x A) * d) B * b (arXiv:2310.11454, eq. 2). Trainable: rank + out per kernel.

  A [in, rank] and B [rank, out] are as large as the largest layer needs, one of each per model.

  Attributes:
    rank: of A and B; vectors are cheap, so it may be large.
    start_d: what d starts with.
  """

  peft = PeftForm(
    type='VERA',
    keys={
      'rank': Key(name='r', default=256, least=1),
      'start_d': Key(name='d_initial', default=0.1),
    },
    tensors=(
      Tensor('d', 'vera_lambda_d', 'rank -> rank', on=('linear',)),
      Tensor('b', 'vera_lambda_b', 'out -> out', on=('linear',)),
    ),
    shared=(
      Tensor('shared_a', 'base_model.vera_A', 'in rank -> rank in'),
      Tensor('shared_b', 'base_model.vera_B', 'rank out -> out rank'),
    ),
    fixed={'save_projection': (True,)},
    neutral=('init_weights', 'projection_prng_key'),
    training=('vera_dropout',),
  )

  rank: int = 256
  start_d: float = peftlab.initial(0.1)

  def slots(self):
    uniform = jax.nn.initializers.he_uniform()
    return {
      'd': peftlab.Slot(dims='rank', init=peftlab.constant(self.start_d)),
      'b': peftlab.Slot(dims='out'),
      'shared_a': peftlab.Slot(dims='in rank', init=uniform, trainable=False, shared=True),
      'shared_b': peftlab.Slot(dims='rank out', init=uniform, trainable=False, shared=True),
    }

  def apply(self, x, base, p):
    return base(x) + (((x @ p.shared_a) * p.d) @ p.shared_b) * p.b

  def fuse(self, w, p):
    return w + ((p.shared_a * p.d) @ p.shared_b) * p.b

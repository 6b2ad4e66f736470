"""3.2: the TPU kernel equals the reference in interpret mode, for all tiles and ragged edges."""

import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import quant
from peftlab.quant import encoding, pallas_product


@pytest.mark.parametrize(
  ('name', 'rows', 'ins', 'outs'),
  (
    ('nf4(tile=32, held=int4)', 16, 128, (128,)),
    ('nf4(tile=64, held=int4)', 5, 192, (3, 50)),  # rows and outputs that no block divides
    ('int8', 9, 64, (130,)),
    ('q4_1(held=int4)', 8, 96, (2, 64)),
  ),
)
def test_kernel_equals_the_product(name, rows, ins, outs):
  random = np.random.default_rng(0)
  words = ('in', *('out' for _ in outs))
  chosen = quant.get_quantizer(name)
  form = quant.Form(quantizer=chosen, words=words, shape=(ins, *outs), dtype='float32')
  w = jnp.asarray(random.standard_normal((ins, *outs)), jnp.float32)
  held = quant.Quantized(encoding.encode(form, w), form)
  x = jnp.asarray(random.standard_normal((rows, ins)), jnp.float32)
  got = pallas_product.product(chosen, x, chosen.expand(held.arrays), interpret=True)
  np.testing.assert_allclose(got, x @ held.matrix(), rtol=1e-5, atol=1e-4)

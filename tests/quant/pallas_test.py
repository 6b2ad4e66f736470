"""The TPU kernel equals the reference in interpret mode, for all tiles and ragged edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import quant
from peftlab.quant import encoding, pallas_product


@pytest.mark.parametrize(
  ('name', 'rows', 'ins', 'outs'),
  (
    ('nf4(tile=32, held=int4)', 16, 128, (128,)),
    ('nf4(tile=128, held=int4)', 7, 384, (130,)),
    ('int4(tile=64, held=int4)', 3, 640, (40,)),  # more tiles than one block takes
    ('int8(tile=32)', 8, 96, (5, 30)),
    ('fp8_e4m3', 8, 64, (64,)),
    ('mxfp4(held=int4)', 9, 96, (33,)),
    ('nf4(tile=64, held=int4)', 5, 192, (3, 50)),  # rows and outputs that no block divides
    ('int8', 9, 64, (130,)),
    ('int8', 9, 1536, (130,)),  # one tile, of three blocks
    ('nf4(tile=1024, double=false, held=int4)', 8, 2048, (128,)),
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


def test_bytes_moved_are_counted_by_hand():
  """x [2048, 4096] @ w [4096, 14336]: 2 blocks of 1024 rows, 28 of 512 outputs, 8 of 512 inputs."""
  shape = jax.ShapeDtypeStruct
  arrays = {'codes': shape((64, 64, 14336), 'int4'), 'scales': shape((64, 14336), 'float32')}
  x = 28 * 2048 * 4096 * 2  # once per block of outputs
  held = 2 * (4096 * 14336 // 2 + 64 * 14336 * 4)  # once per block of rows
  y = 2048 * 14336 * 2
  moved = pallas_product.bytes_moved(shape((2048, 4096), 'bfloat16'), arrays)
  assert moved == x + held + y

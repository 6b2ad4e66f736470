"""Dtypes of training on a quantized base: activations compute, adapters and moments float32."""

import dataclasses

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import quant
from peftlab.models.decoder import Decoder
from peftlab.quant import codebooks
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


def carries(jaxpr, shape):
  """Dtypes of all values of a shape that a scan anywhere in a jaxpr carries."""
  found = set()
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'scan':  # what it stacks has one more dimension
      carried = [value.aval for value in equation.outvars]
      found |= {str(aval.dtype) for aval in carried if aval.shape == shape}
    inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'jaxpr'))
    for one in (getattr(leaf, 'jaxpr', leaf) for leaf in inner):
      found |= carries(one, shape) if hasattr(one, 'eqns') else set()
  return found


@pytest.mark.parametrize('dtype', ('bfloat16', 'float32'))
@pytest.mark.parametrize(
  'quantizer', ('nf4(tile=4, double=false, scale_dtype=bfloat16)', 'nf4(tile=4)', 'int8')
)
def test_a_step_keeps_every_dtype(dtype, quantizer):
  model = Decoder(dataclasses.replace(tiny.DECODER, dtype=dtype), rngs=nnx.Rngs(0))
  held, _ = quant.quantize(model, quantizer)
  one, batch = tiny.trainee(model=held), tiny.batch()
  trained = one.parts.adapter, [a for a in jax.tree.leaves(one.state.inner) if a.ndim]
  assert {str(a.dtype) for a in jax.tree.leaves(trained)} == {'float32'}
  scales = held.layers.mlp.up.kernel.get_raw_value().arrays['scales']
  wanted = {'int8': 'float32', 'nf4(tile=4)': 'int8'}.get(quantizer, 'bfloat16')
  assert str(scales.dtype) == wanted
  arguments = one.parts.adapter, one.state, one.parts.base, batch
  traced = jax.make_jaxpr(one.step)(*arguments)
  assert carries(traced.jaxpr, (*batch['tokens'].shape, tiny.DECODER.embed)) == {dtype}
  adapter, state, metrics = jax.eval_shape(one.step, *arguments)
  chex.assert_trees_all_equal_dtypes((adapter, state), (one.parts.adapter, one.state))
  assert metrics['loss'].dtype == jnp.float32


@pytest.mark.parametrize('held', ('bytes', 'int4'))
@pytest.mark.parametrize(
  ('name', 'table', 'scales'),
  (
    # QLoRA, appendix E; e2m1 of OCP MX 1.0, where bit 3 is the sign.
    ('nf4(tile=32, double=false', codebooks.NORMAL_FLOAT, {'scales': np.float32([[1]])}),
    (
      'mxfp4(tile=32',
      (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
      {'exponents': np.uint8([[127]])},
    ),
  ),
)
def test_both_ways_to_look_up_give_the_table(name, table, scales, held):
  """All 16 codes: by a gather (bytes, on a CPU) and by the tree of selections."""
  chosen = quant.get_quantizer(f'{name}, held={held})')
  codes = jnp.tile(jnp.arange(16, dtype=jnp.int8), 2).reshape(1, 32, 1)
  arrays = {'codes': chosen.hold(codes)} | {k: jnp.asarray(a) for k, a in scales.items()}
  got = jax.jit(lambda a: chosen.decode(a, jnp.float32))(arrays)
  np.testing.assert_array_equal(got.ravel(), np.tile(np.float32(table), 2))
  tree = codebooks.select(chosen.signed(arrays['codes']), table, jnp.float32)  # of other devices
  np.testing.assert_array_equal(tree.ravel(), np.tile(np.float32(table), 2))

"""Dtypes of training on a quantized base: activations compute, adapters and moments float32."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import quant
from peftlab.models.decoder import Decoder
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


def carries(jaxpr, shape):
  """Dtypes of all values of a shape that a scan anywhere in a jaxpr carries."""
  found = set()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'scan':
      first, count = eqn.params['num_consts'], eqn.params['num_carry']
      carried = [v.aval for v in eqn.invars[first : first + count]]
      found |= {str(aval.dtype) for aval in carried if aval.shape == shape}
    for inner in jax.core.jaxprs_in_params(eqn.params):
      found |= carries(inner, shape)
  return found


@pytest.mark.parametrize('dtype', ('bfloat16', 'float32'))
@pytest.mark.parametrize(
  'quantizer', ('nf4(tile=4, double=false, scale_dtype=bfloat16)', 'nf4(tile=4)', 'int8')
)
def test_a_step_keeps_every_dtype(dtype, quantizer):
  model = Decoder(dataclasses.replace(tiny.DECODER, dtype=dtype), rngs=nnx.Rngs(0))
  held, _ = quant.quantize(model, quantizer)
  one, batch = tiny.trainee(model=held), tiny.batch()
  before = jax.tree.map(lambda a: a.dtype, (one.parts.adapter, one.state, one.parts.base))
  trained = one.parts.adapter, [a for a in jax.tree.leaves(one.state.inner) if a.ndim]
  assert {str(a.dtype) for a in jax.tree.leaves(trained)} == {'float32'}
  scales = held.layers.mlp.up.kernel.get_raw_value().arrays['scales']
  wanted = {'int8': 'float32', 'nf4(tile=4)': 'int8'}.get(quantizer, 'bfloat16')
  assert str(scales.dtype) == wanted
  traced = jax.make_jaxpr(one.step)(one.parts.adapter, one.state, one.parts.base, batch)
  assert carries(traced.jaxpr, (*batch['tokens'].shape, tiny.DECODER.embed)) == {dtype}
  (metrics,) = one.run(batch)
  assert np.isfinite(metrics['loss'])
  after = jax.tree.map(lambda a: a.dtype, (one.parts.adapter, one.state, one.parts.base))
  assert before == after


@pytest.mark.parametrize('held', ('bytes', 'int4'))
@pytest.mark.parametrize('name', ('nf4(tile=8, double=false', 'mxfp4('))
def test_both_ways_to_look_up_give_the_table(name, held):
  """All 16 codes by a gather (bytes, on a CPU) and by the tree: the published numbers, in f32."""
  tables = {
    'nf4': quant.codebooks.NORMAL_FLOAT,
    'mxfp4': (*quant.codebooks.E2M1, *(-x for x in quant.codebooks.E2M1)),
  }
  joined = f'{name}, held={held})' if name[-1] != '(' else f'{name}held={held})'
  chosen = quant.get_quantizer(joined)
  codes = jnp.arange(32, dtype=jnp.int8).reshape(1, 32, 1) % 16
  scales = {'scales': jnp.ones((1, 1))} if chosen.name == 'nf4' else {}
  scales = scales or {'exponents': jnp.full((1, 1), 127, jnp.uint8)}
  got = chosen.decode({'codes': chosen.hold(codes), **scales}, jnp.float32)
  np.testing.assert_array_equal(
    got.ravel(), np.tile(np.asarray(tables[chosen.name], np.float32), 2)
  )

"""Layers that carry adapters: each against the layer with a merged kernel; dtypes; dropout."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _kernel, _layer
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases

pytestmark = pytest.mark.usefixtures('quick_compiles')


def rngs():
  return nnx.Rngs(0)


NORMAL = nnx.initializers.normal(1.0)
TOKENS = jnp.array([[1, 5, 2], [0, 6, 6]])
# layer with bias, shape of its input
LAYERS = {
  'linear': (lambda: nnx.Linear(6, 10, bias_init=NORMAL, rngs=rngs()), (2, 3, 6)),
  'linear, one row': (lambda: nnx.Linear(6, 10, bias_init=NORMAL, rngs=rngs()), (6,)),
  'general': (
    lambda: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), bias_init=NORMAL, rngs=rngs()),
    (2, 3, 2, 3),
  ),
  'general, leading axes': (
    lambda: nnx.LinearGeneral((2, 3), 5, axis=(1, 0), bias_init=NORMAL, rngs=rngs()),
    (2, 3, 4),
  ),
  'einsum': (
    lambda: nnx.Einsum('btd,hdk->bthk', (2, 6, 4), (2, 4), bias_init=NORMAL, rngs=rngs()),
    (2, 3, 6),
  ),
  'einsum, moved': (
    lambda: nnx.Einsum('btd,hdk->bhtk', (2, 6, 4), (2, 1, 4), bias_init=NORMAL, rngs=rngs()),
    (2, 3, 6),
  ),
  'einsum, dots': (
    lambda: nnx.Einsum('...hd,hde->...e', (2, 3, 7), (7,), bias_init=NORMAL, rngs=rngs()),
    (2, 3, 2, 3),
  ),
  'einsum without bias': (lambda: nnx.Einsum('td,df->tf', (6, 4), rngs=rngs()), (3, 6)),
  'conv': (
    lambda: nnx.Conv(6, 10, (3,), strides=(2,), bias_init=NORMAL, rngs=rngs()),
    (2, 7, 6),
  ),
  'conv 2d': (
    lambda: nnx.Conv(3, 5, (2, 3), padding='VALID', kernel_dilation=2, rngs=rngs()),
    (2, 7, 8, 3),
  ),
}


def _randomized(layer, *, where='all-linear', **fields):
  model, _ = peftlab.attach(layer, LoRA(rank=3, **fields), where=where)
  return cases.randomized(peftlab.split(model), by=0.5)


@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_with_lora_is_the_layer_with_a_merged_kernel(name):
  make, shape = LAYERS[name]
  parts = _randomized(make())
  x = jax.random.normal(jax.random.key(1), shape)
  got = peftlab.merge(parts)(x)
  merged = make()
  words = _kernel.layer_type(merged).layout(merged).words
  p = parts.adapter['adapters'][0]
  delta = (p['a'] @ p['b']) * p['scale']
  merged.kernel[...] += _kernel.from_matrix(delta, words, merged.kernel.shape)
  expected = merged(x)
  assert got.shape == expected.shape
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
  assert float(jnp.max(jnp.abs(got - make()(x)))) > 1e-2


def test_an_embedding_with_lora_is_the_table_with_the_product_added():
  parts = _randomized(nnx.Embed(7, 4, rngs=rngs()), where='Embed')
  p = parts.adapter['adapters'][0]
  table = parts.base['embedding'] + (p['a'] @ p['b']) * p['scale']
  np.testing.assert_allclose(peftlab.merge(parts)(TOKENS), table[TOKENS], rtol=1e-5, atol=1e-5)


def test_the_frozen_matmul_is_computed_by_the_layer_itself():
  """A layer that scales its output: base(x) is its own output, not x @ kernel."""

  class Doubling(nnx.Linear):
    def __call__(self, inputs):
      return 2 * super().__call__(inputs)

  layer = Doubling(6, 10, use_bias=False, rngs=rngs())
  model, _ = peftlab.attach(layer, LoRA(rank=2))
  x = jnp.ones((2, 6))
  np.testing.assert_array_equal(model(x), layer(x))


DTYPES = {
  # (dtype of x, dtype of the layer) -> dtype of y, as flax computes it
  'all float32': (jnp.float32, None, jnp.float32),
  'x bfloat16 in a bfloat16 layer': (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
  'x float32 in a bfloat16 layer': (jnp.float32, jnp.bfloat16, jnp.bfloat16),
}


@pytest.mark.parametrize('case', DTYPES)
def test_an_adapter_keeps_the_dtype_of_its_layer(case):
  given, dtype, expected = DTYPES[case]
  model, _ = peftlab.attach(nnx.Linear(6, 10, dtype=dtype, rngs=rngs()), LoRA(rank=2))
  assert model(jnp.ones((2, 6), given)).dtype == expected
  assert model.adapters[0].a.dtype == jnp.float32


def test_adapters_are_told_by_type_and_carry_their_name():
  model, _ = peftlab.attach(nnx.Linear(6, 10, rngs=rngs()), LoRA(rank=2), name='tuned')
  attached = model.adapters[0]
  assert (attached.name, attached.adapter, attached.active) == ('tuned', LoRA(rank=2), True)
  assert {type(getattr(attached, n)) for n in 'ab'} == {peftlab.AdapterParam}
  assert type(attached.scale) is peftlab.AdapterConstant
  assert _layer.plain_class(type(model)) is nnx.Linear
  assert _layer.adapted_class(nnx.Linear) is type(model)


def test_names_do_not_count_when_graphs_are_compared():
  first, second = (
    peftlab.split(peftlab.attach(nnx.Linear(6, 10, rngs=rngs()), LoRA(rank=2), name=n)[0])
    for n in ('one', 'two')
  )
  assert first.graph == second.graph
  assert hash(first.graph) == hash(second.graph)
  assert peftlab.merge(second).adapters[0].name == 'two'


def test_no_gradient_reaches_a_constant():
  parts = _randomized(nnx.Linear(6, 10, rngs=rngs()))

  def loss(adapter):
    return jnp.sum(peftlab.merge(parts.replace(adapter=adapter))(jnp.ones((2, 6))))

  gradient = jax.grad(loss)(parts.adapter)['adapters'][0]
  assert float(gradient['scale']) == 0.0
  assert float(jnp.max(jnp.abs(gradient['a']))) > 0


def test_dropout_starts_in_training_as_every_nnx_layer_and_eval_switches_it_off():
  model = peftlab.merge(_randomized(nnx.Linear(6, 10, rngs=rngs()), dropout=0.5))
  x = jnp.ones((4, 6))
  first, second = model(x), model(x)
  model.eval()
  still = model(x)
  np.testing.assert_array_equal(model(x), still)
  model.train()
  assert not np.array_equal(model(x), still)
  assert not np.array_equal(first, second)
  assert not np.array_equal(first, still)
  model.eval()
  np.testing.assert_array_equal(model(x), still)


def test_an_adapter_that_draws_nothing_has_one_graph_in_training_and_evaluation():
  model = peftlab.merge(_randomized(nnx.Linear(6, 10, rngs=rngs())))
  graph = peftlab.split(model).graph
  model.eval()
  assert peftlab.split(model).graph == graph


def test_the_same_rng_state_draws_the_same_dropout():
  model = peftlab.merge(_randomized(nnx.Linear(6, 10, rngs=rngs()), dropout=0.5))
  model.train()
  parts = peftlab.split(model)

  def run():
    return peftlab.merge(parts)(jnp.ones((4, 6)))

  np.testing.assert_array_equal(run(), run())

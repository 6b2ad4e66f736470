"""Dense, RMSNorm and Embedding against numpy; their logical axes; adapters see them as kernels."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import _kernel
from peftlab.models.layers import Dense, Embedding, RMSNorm

RNG = np.random.default_rng(0)


def dense(inputs, outputs, **options):
  return Dense(inputs, outputs, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
  ('inputs', 'outputs', 'equation'),
  (
    ({'embed': 6}, {'mlp': 5}, 'tx,xy->ty'),
    ({'embed': 6}, {'q_heads': 3, 'head_dim': 4}, 'tx,xyz->tyz'),
    ({'q_heads': 3, 'head_dim': 4}, {'embed': 6}, 'txy,xyz->tz'),
  ),
)
@pytest.mark.parametrize('bias', (False, True))
def test_dense_contracts_its_input_dimensions(inputs, outputs, equation, bias):
  layer = dense(inputs, outputs, bias=bias)
  x = RNG.normal(size=(7, *inputs.values())).astype(np.float32)
  expected = np.einsum(equation, x, np.asarray(layer.kernel[...]))
  if bias:
    layer.bias[...] = jnp.asarray(RNG.normal(size=layer.bias.shape), jnp.float32)
    expected = expected + np.asarray(layer.bias[...])
  np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=1e-5)


def test_dense_takes_leading_dimensions_as_they_come():
  layer = dense({'embed': 6}, {'q_heads': 3, 'head_dim': 4})
  x = jnp.asarray(RNG.normal(size=(2, 5, 6)), jnp.float32)
  np.testing.assert_allclose(layer(x).reshape(10, 3, 4), layer(x.reshape(10, 6)), rtol=1e-6)
  assert layer(x[0, 0]).shape == (3, 4)


def test_dense_names_every_dimension():
  layer = dense({'q_heads': 3, 'head_dim': 4}, {'embed': 6}, bias=True)
  assert layer.kernel.get_metadata()['axes'] == ('q_heads', 'head_dim', 'embed')
  assert layer.bias.get_metadata()['axes'] == ('embed',)
  assert (layer.in_dims, layer.shape) == (2, (3, 4, 6))


def test_dense_starts_with_variance_one_over_inputs():
  layer = dense({'q_heads': 16, 'head_dim': 16}, {'embed': 256})
  assert np.var(np.asarray(layer.kernel[...])) * 256 == pytest.approx(1, rel=0.05)


def test_dense_keeps_the_dtype_of_its_input():
  layer = dense({'embed': 6}, {'mlp': 5}, bias=True)
  assert layer(jnp.ones((2, 6), jnp.bfloat16)).dtype == jnp.bfloat16


def test_adapters_see_dense_as_a_matrix():
  layout = _kernel.layer_type(layer := dense({'q_heads': 3, 'head_dim': 4}, {'embed': 6})).layout
  assert layout(layer).words == ('in', 'in', 'out')
  assert layout(layer).shape == (3, 4, 6)
  x, kernel, y = layout(layer).equation(4)
  a, w = RNG.normal(size=(2, 5, 3, 4)), np.asarray(layer.kernel[...])
  expected = layer(jnp.asarray(a, jnp.float32))
  np.testing.assert_allclose(np.einsum(f'{x},{kernel}->{y}', a, w), expected, atol=1e-5)


@pytest.mark.parametrize('unit_offset', (False, True))
def test_norm_divides_by_the_root_mean_square(unit_offset):
  norm = RMSNorm(3, eps=0.5, unit_offset=unit_offset)
  norm.scale[...] = jnp.asarray([1.0, 2.0, -1.0])
  # mean square of (1, 2, 4) is 7, and 7.5 with eps
  expected = np.array([1.0, 2.0, 4.0]) / np.sqrt(7.5)
  expected *= np.array([2.0, 3.0, 0.0]) if unit_offset else np.array([1.0, 2.0, -1.0])
  np.testing.assert_allclose(norm(jnp.asarray([[1.0, 2.0, 4.0]]))[0], expected, rtol=1e-6)


def test_a_fresh_norm_has_factor_one():
  x = jnp.asarray([[3.0, -3.0]])
  for unit_offset in (False, True):
    np.testing.assert_allclose(RMSNorm(2, eps=1e-9, unit_offset=unit_offset)(x), [[1.0, -1.0]])


def test_norm_computes_in_float32_and_keeps_the_dtype():
  norm = RMSNorm(2, eps=1e-6, dtype=jnp.float16)
  y = norm(jnp.full((1, 2), 300.0, jnp.float16))  # 300 squared is beyond float16
  assert y.dtype == jnp.float16
  np.testing.assert_allclose(np.asarray(y, np.float32), 1.0, rtol=1e-3)


def test_embedding_reads_rows_and_attends_with_its_transpose():
  layer = Embedding(5, 3, rngs=nnx.Rngs(0))
  table = np.asarray(layer.table[...])
  np.testing.assert_array_equal(layer(jnp.asarray([[4, 0]])), table[[4, 0]][None])
  x = RNG.normal(size=(2, 3)).astype(np.float32)
  np.testing.assert_allclose(layer.attend(jnp.asarray(x)), x @ table.T, atol=1e-6)
  assert layer.table.get_metadata()['axes'] == ('vocab', 'embed')


def test_a_token_beyond_the_vocabulary_is_nan():
  layer = Embedding(5, 3, rngs=nnx.Rngs(0))
  read = jax.jit(layer.__call__)
  assert jnp.isnan(read(jnp.asarray([5]))).all()
  assert jnp.isnan(read(jnp.asarray([-1]))).all()  # is not the last one

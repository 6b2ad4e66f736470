"""Law 6 for pipelines: outputs and adapter gradients are those of scan, on every kind of mesh."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import pytest

import peftlab
from peftlab import quant
from peftlab.appliers import Pipeline, Scan, Sequential
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from tests.appliers import pipelines

pytestmark = pytest.mark.usefixtures('quick_compiles')

X = pipelines.X


@functools.cache
def under_scan(length, axis=0):
  """(parts, (outputs, loss, gradients)) on one device."""
  parts = pipelines.adapted(length, axis=axis)
  return parts, cases.outputs_and_gradients(parts, X)


# name: (layers, pipeline, mesh sizes stage x fsdp x tensor)
ROWS = {
  '2 layers per stage': (8, Pipeline(microbatches=4), (4, 2, 1)),
  'circular': (8, Pipeline(microbatches=8, repeats=2), (4, 1, 2)),
  'plain': (4, Pipeline(microbatches=4), (4, 2, 1)),
  '2 stages': (8, Pipeline(microbatches=8), (2, 2, 2)),
  'half outside': (16, Pipeline(microbatches=4, repeats=2, staged=8, rest='first'), (4, 1, 2)),
  'padded': (6, Pipeline(microbatches=2, rest='pad'), (4, 1, 2)),
  'nothing staged': (2, Pipeline(microbatches=2, rest='last'), (4, 2, 1)),
}


@pytest.mark.parametrize('row', ROWS)
def test_outputs_and_gradients_are_those_of_scan(row):
  length, pipeline, sizes = ROWS[row]
  parts, expected = under_scan(length)
  mesh = pipelines.mesh(*sizes)
  pipelines.assert_same(pipelines.laid_out(parts, pipeline, mesh), expected, X, mesh)


@functools.cache
def quantized_under_scan(qtype):
  model, _ = quant.quantize(pipelines.model(4), qtype, tile=8)
  parts = cases.randomized(peftlab.split(peftlab.attach(model, LoRA(rank=2))[0]))
  return parts, cases.outputs_and_gradients(parts, X)


@pytest.mark.parametrize('qtype', ('int8', 'nf4'))
def test_a_quantized_base_gives_what_it_gives_under_scan(qtype):
  parts, expected = quantized_under_scan(qtype)
  mesh = pipelines.mesh(2, 2, 2)
  staged = pipelines.laid_out(parts, Pipeline(microbatches=2, repeats=2), mesh)
  pipelines.assert_same(staged, expected, X, mesh)


def test_remat_changes_no_output_and_no_gradient():
  parts, expected = under_scan(4)
  mesh = pipelines.mesh(2)
  pipeline = Pipeline(microbatches=2, repeats=2, remat='full')
  pipelines.assert_same(pipelines.laid_out(parts, pipeline, mesh), expected, X, mesh)


def test_the_stack_axis_changes_no_output_and_no_gradient():
  parts, expected = under_scan(6, axis=1)
  mesh = pipelines.mesh(4)
  pipeline = Pipeline(microbatches=2, rest='last')
  pipelines.assert_same(pipelines.laid_out(parts, pipeline, mesh), expected, X, mesh)


@pytest.mark.parametrize('row', ROWS)
def test_explicit_axes_give_what_scan_gives(row):
  length, pipeline, sizes = ROWS[row]
  parts, expected = under_scan(length)
  mesh = pipelines.mesh(*sizes, kind=AxisType.Explicit)
  parts = pipelines.laid_out(parts, pipeline, mesh, replicated=True)
  pipelines.assert_same(parts, expected, X, mesh)


@pytest.mark.parametrize(('qtype', 'repeats'), (('int8', 1), ('nf4', 2)))
def test_codes_with_explicit_axes_give_what_scan_gives(qtype, repeats):
  parts, expected = quantized_under_scan(qtype)
  mesh = pipelines.mesh(2, 2, kind=AxisType.Explicit)
  pipeline = Pipeline(microbatches=2, repeats=repeats)
  staged = pipelines.laid_out(parts, pipeline, mesh, replicated=True)
  pipelines.assert_same(staged, expected, X, mesh)


def test_a_stack_in_stage_order_runs_under_scan_and_sequential():
  parts, (y, _, _) = under_scan(6)
  mesh = pipelines.mesh(4)
  laid = peftlab.merge(pipelines.laid_out(parts, Pipeline(rest='pad'), mesh))
  for applier in (Scan(), Sequential()):
    laid.applier = applier
    cases.assert_close(cases.forward(peftlab.split(laid), X), y, str(applier))


def test_16_bit_carries_keep_their_dtype_and_come_close():
  layers = peftlab.split(pipelines.model(4, dtype=jnp.bfloat16).layers)
  x = {'x': X.astype(jnp.bfloat16), 'count': jnp.zeros((8,), jnp.int32)}

  def body(layer, carry):
    return {'x': layer(carry['x']).astype(jnp.float32), 'count': carry['count'] + 1}

  def run(x):
    out, _ = Pipeline(microbatches=2).apply(layers, x, body)
    return jnp.sum(out['x'].astype(jnp.float32)), out

  with jax.set_mesh(pipelines.mesh(2)):
    gradient, out = jax.jit(jax.grad(run, has_aux=True, allow_int=True))(x)
  assert (out['x'].dtype, gradient['x'].dtype) == (jnp.bfloat16, jnp.bfloat16)
  assert out['count'].tolist() == [4] * 8
  y, _ = Sequential().apply(layers, x, body)
  assert cases.distance(out['x'], y['x']) < 0.02


BAD = {
  'rows': (Pipeline(microbatches=3), X, 'microbatches=3. must divide the batch, which has 8 rows'),
  'a carry without rows': (
    Pipeline(microbatches=4),
    (X, jnp.zeros(())),
    r'must be the same for all; their shapes are \(8, 16\), \(\)\.',
  ),
  'order': (
    Pipeline(repeats=2),
    X,
    r'not laid out for 2 stages x 2 repeats x 1 layers; .* call Pipeline.lay_out once',
  ),
}


@pytest.mark.parametrize('case', BAD)
def test_what_does_not_fit_is_refused(case):
  pipeline, x, message = BAD[case]
  layers = peftlab.split(pipelines.model(4).layers)
  with jax.set_mesh(pipelines.mesh(2)), pytest.raises(ValueError, match=message):
    pipeline.apply(layers, x, lambda layer, x: layer(x))

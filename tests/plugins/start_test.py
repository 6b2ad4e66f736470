"""First values that are made from weights, from what quantization lost, and from data."""

import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import fuse, testing
from peftlab.plugins import eva, loftq, olora, pissa
from peftlab.testing import case as cases
from tests.plugins.zoo_cases import FOLDER, PREFIX, golden

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_ranks')


def linear(weight):
  layer = nnx.Linear(weight.shape[1], weight.shape[0], use_bias=False, rngs=nnx.Rngs(0))
  layer.kernel[...] = jnp.asarray(weight.T)
  return layer


@pytest.mark.parametrize(
  ('name', 'adapter'),
  (
    ('pissa/linear', pissa.PiSSA(rank=4, alpha=8)),
    ('pissa/linear_rslora', pissa.PiSSA(rank=4, alpha=8, rslora=True)),
    ('olora/linear', olora.OLoRA(rank=4, alpha=8)),
  ),
)
def test_what_is_subtracted_is_what_peft_takes_out_of_the_base(name, adapter):
  base = golden(name)
  model, _ = peftlab.attach(linear(base['base/layer.weight']), adapter)
  p = model.adapters[0]
  taken = p.scale[...] * (p.a0[...] @ p.b0[...])
  expected = base['base/layer.weight'] - base['residual/layer.weight']
  np.testing.assert_allclose(taken, expected.T, atol=2e-5)
  np.testing.assert_array_equal(p.a[...], p.a0[...])


def test_loftq_starts_with_the_best_low_rank_part_of_what_was_lost():
  with np.load(FOLDER / 'loftq' / 'linear_64.npz') as file:
    told = dict(file)
  weight = next(told[k] for k in told if k.endswith('weight') or k == 'weight')
  quantized, low_rank = (next(told[k] for k in told if n in k) for n in ('quantized', 'low_rank'))
  quantized, low_rank = (a[0] if a.ndim == 3 else a for a in (quantized, low_rank))
  adapter = loftq.LoftQ(rank=4, alpha=8)
  model, _ = peftlab.attach(linear(quantized), adapter, full=linear(weight))
  p = model.adapters[0]
  np.testing.assert_allclose(p.scale[...] * (p.a[...] @ p.b[...]), low_rank.T, atol=2e-6)


@pytest.mark.parametrize('alpha', (8.0, -8.0))
@pytest.mark.parametrize('iterations', (1, 5))
def test_loftq_in_turns_is_that_of_peft(iterations, alpha):
  with np.load(FOLDER / 'loftq' / 'linear_64.npz') as file:  # peft.utils.loftq_init gives the same
    told = {k: v for k, v in dict(file).items() if k.split('/')[0] in (str(iterations), 'weight')}
  full, adapter = linear(told['weight']), loftq.LoftQ(rank=4, alpha=alpha)
  options = {'iterations': iterations, 'where': '.*', 'tile': 64}
  model, _ = loftq.start_from(full, adapter, 'nf4(double=false)', **options)
  p = model.adapters[0]
  low_rank = p.scale[...] * (p.a[...] @ p.b[...])
  np.testing.assert_allclose(low_rank, told[f'{iterations}/low_rank'].T, atol=2e-5)
  plain = peftlab.dequantize(peftlab.detach(model))
  np.testing.assert_allclose(plain.kernel[...], told[f'{iterations}/quantized'].T, atol=1e-5)
  np.testing.assert_array_equal(full.kernel[...], told['weight'].T)
  np.testing.assert_allclose(  # A and B are equally large
    np.linalg.norm(p.a[...], axis=0), np.linalg.norm(p.b[...], axis=1), rtol=1e-4
  )


def test_loftq_in_turns_comes_nearer_to_a_stack_of_layers():
  model = testing.StackModel((64, 64))
  lost = []
  for iterations in (1, 4):
    made, _ = loftq.start_from(model, loftq.LoftQ(rank=8), iterations=iterations, name='q')
    fused = fuse.fuse(made, name='q')
    errors = (fused.layers.up.kernel[...] - model.layers.up.kernel[...]) ** 2
    lost.append(np.sqrt(errors.sum((1, 2))))  # [layers]
  assert (lost[1] < 0.95 * lost[0]).all()


@pytest.mark.parametrize('kind', (pissa.PiSSA, loftq.LoftQ))
def test_a_start_from_a_matrix_needs_a_scale(kind):
  with pytest.raises(ValueError, match='alpha is 0; a start from a matrix needs another scale'):
    peftlab.attach(testing.StackModel(), kind(rank=2, alpha=0.0))


def test_pissa_with_a_negative_scale_starts_as_its_base():
  model, _ = peftlab.attach(testing.StackModel(), pissa.PiSSA(rank=2, alpha=-4.0))
  y = cases.forward(peftlab.split(model), cases.stack_input())
  cases.assert_close(y, cases.base_output(), 'output')


def test_loftq_with_nothing_lost_starts_as_its_base():
  model, _ = peftlab.attach(testing.StackModel(), loftq.LoftQ(rank=2))
  y = cases.forward(peftlab.split(model), cases.stack_input())
  cases.assert_equal(y, cases.base_output(), 'output')


def test_eva_starts_as_in_peft():
  base = golden('eva/linear')
  layer = linear(base['base/layer.weight'])
  x = jnp.asarray(base['base/input'])
  adapter = eva.EVA(rank=4, alpha=8)
  model, report = eva.start_from(layer, adapter, lambda m, x: m(x), [x], where='.*')
  expected = base[f'start/{PREFIX}lora_A.weight']
  np.testing.assert_allclose(model.adapters[0].a[...], expected.T, atol=1e-4)
  assert report.trainable == 320


def test_eva_says_that_it_was_attached_without_data():
  told = 'EVA is attached without its own first values; peftlab.plugins.eva.start_from makes them.'
  with pytest.warns(UserWarning, match='EVA') as warned:
    peftlab.attach(testing.StackModel(), eva.EVA(rank=2))
  assert [str(w.message) for w in warned] == [told]
  x = cases.stack_input()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    eva.start_from(testing.StackModel(), eva.EVA(rank=2), lambda m, x: m(x), [x])


def test_eva_gives_ranks_to_the_layers_that_need_them():
  model = testing.StackModel()
  adapter = eva.EVA(rank=2, alpha=4)
  x = cases.stack_input()
  made, report = eva.start_from(model, adapter, lambda m, x: m(x), [x, -x], rho=2.0)
  ranks = {n: getattr(made.layers, n).adapters[0].adapter.rank for n in ('up', 'down')}
  assert sum(ranks.values()) == 4
  scales = {float(getattr(made.layers, n).adapters[0].scale[0]) for n in ranks}
  assert scales == {2.0}
  y = cases.forward(peftlab.split(made), x)
  cases.assert_close(y, cases.base_output(), 'output')
  assert report.trainable == 2 * sum(r * 40 for r in ranks.values())
  cases.assert_equal(
    jax.device_get(made.layers.up.kernel[...]), model.layers.up.kernel[...], 'base'
  )


def test_eva_refuses_inputs_that_say_nothing():
  model, adapter, x = testing.StackModel(), eva.EVA(rank=2), cases.stack_input()

  def start(batches, **options):
    return eva.start_from(model, adapter, lambda m, x: m(x), batches, **options)

  with pytest.raises(ValueError, match='There was no batch; expected at least one'):
    start([])
  with pytest.raises(ValueError, match=r'The inputs of layers\.\w+ are all the same'):
    start([jnp.zeros_like(x) + x[:1]])
  with pytest.raises(ValueError, match=r'The inputs of layers\.\w+ are not finite'):
    start([x, x * jnp.nan])
  with pytest.raises(ValueError, match=r'rho is 0\.5; it must be at least 1'):
    start([x], rho=0.5)


def test_the_moments_of_the_inputs_are_those_of_numpy():
  layer = linear(np.ones((3, 5), np.float32))
  x = np.random.default_rng(0).normal(1.0, 2.0, (4, 6, 5)).astype(np.float32)
  batches = [jnp.asarray(part) for part in x.reshape(2, 2, 6, 5)]
  found = peftlab.input_moments(layer, lambda m, x: m(x), batches, where='.*')[()]
  rows = x.reshape(-1, 5).astype(np.float64)
  assert found.count == 24
  np.testing.assert_allclose(found.mean, rows.mean(0), atol=1e-5)
  np.testing.assert_allclose(found.covariance, np.cov(rows.T, bias=True), atol=1e-4)

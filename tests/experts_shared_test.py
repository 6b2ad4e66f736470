"""What all experts of a layer can share: adapter types, configs, steps, codes."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _claims, _registry, appliers, quant
from peftlab.models.experts import ExpertDense
from peftlab.plugins.adalora import AdaLoRA
from peftlab.plugins.dora import DoRA
from peftlab.plugins.lora import LoRA
from peftlab.train import config, hooks
from tests.experts_test import INS, Two, body, randomized, stacked

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture
def usual_promotion():
  """Adapter types may promote ranks and dtypes, as JAX lets its users."""
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
    yield


REFUSED = {
  'a type': (DoRA(rank=2), 'one', 'DoRA makes magnitude, .* the experts of .* cannot share one'),
  'a word': (LoRA(), 'ones', "experts has 'ones'; did you mean 'one'"),
  'a pattern': (LoRA(), {'upp': 'one'}, "experts='upp' matches no layer; did you mean 'up'"),
  'no experts': (LoRA(), {'plain': 'one'}, 'no layer .* named .plain. has experts. .*: down, up'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_be_shared_is_refused(name):
  adapter, experts, message = REFUSED[name]
  with pytest.raises(ValueError, match=message):
    peftlab.attach(Two(), adapter, experts=experts)
  with pytest.raises(ValueError, match="experts='one': no layer that is adapted has experts"):
    peftlab.attach(Two(), LoRA(), where='plain', experts='one')


@pytest.mark.parametrize('name', _registry.adapters.names())
@pytest.mark.usefixtures('usual_promotion')
def test_every_type_lets_experts_share_but_what_starts_from_a_weight(name):
  adapter = _claims.small(_registry.adapters.get(name))
  if not adapter.experts or adapter.point:
    return
  shapes = nnx.eval_shape(
    lambda: ExpertDense(2, {'embed': 48}, {'mlp': 32}, rngs=nnx.Rngs(0), bias=True)
  )
  attach = lambda: peftlab.attach(shapes, adapter, where='all-linear', experts='one')  # noqa: E731
  if any(slot.needs_weight for slot in adapter.slots().values()):
    with pytest.raises(ValueError, match='from the weight of each expert'):
      attach()
    return
  assert attach()[0].adapters[0].one


def test_a_config_says_it_in_words():
  experiment = config.Experiment(experts=('up=one', 'each'))
  assert experiment.targets['experts'] == {'up': 'one', '': 'each'}
  assert config.Experiment(experts='one').targets['experts'] == {'': 'one'}
  with pytest.raises(ValueError, match="experts is 'on'; did you mean 'one'"):
    config.Experiment(experts=('up=on',))
  with pytest.raises(ValueError, match="experts has 'up' twice"):
    config.Experiment(experts=('up=one', 'up=each'))


@pytest.mark.usefixtures('usual_promotion')
@pytest.mark.parametrize('experts', ('each', 'one'))
def test_a_penalty_and_what_follows_a_step_see_one_kernel_at_a_time(experts):
  adapter = AdaLoRA(rank=2, target=1)
  model, _ = peftlab.attach(stacked(1), adapter, experts=experts)
  parts = randomized(model)
  held = {n: np.asarray(v, np.float64) for n, v in parts.adapter['adapters'][0].items()}
  a, b = (held[n].reshape(-1, *held[n].shape[-2:]) for n in 'ab')
  far = [
    np.linalg.norm(g - np.eye(2)) for x, y in zip(a, b, strict=True) for g in (x.T @ x, y @ y.T)
  ]
  expected = adapter.orthogonal * np.sum(far) / 2 / len(a)
  assert float(hooks.penalty(peftlab.merge(parts))) == pytest.approx(expected, rel=1e-5)
  changed = hooks.after_step(parts, parts.adapter, step=jnp.int32(0), steps=10)
  for path, array in changed.items():
    assert array.shape == held[path[-1]].shape
  # The gradients given are the values, so a first mean is (1 - beta1) |value|^2.
  mean = changed['adapters', 0, 'a_mean']
  np.testing.assert_allclose(mean, 0.15 * held['a'] ** 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('experts', ('each', 'one'))
def test_codes_give_what_their_numbers_give(experts):
  coded, _ = quant.quantize(stacked(0), 'int8', tile=2)
  x, sizes, ys = jax.random.normal(jax.random.key(1), (10, INS)), jnp.asarray([3, 0, 5, 2]), []
  for base in (coded, quant.dequantize(coded)):
    parts = randomized(peftlab.attach(base, LoRA(rank=2), experts=experts)[0])
    ys.append(appliers.Scan().apply(parts, x, body, sizes)[0])
  np.testing.assert_allclose(*ys, rtol=1e-4, atol=1e-4)

"""The load-balancing loss: transformers' numbers, the same under every applier, in the trainer."""

import functools
import json
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs, appliers
from peftlab.models import routing
from peftlab.models.config import DecoderConfig, Experts
from peftlab.models.decoder import Decoder
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from peftlab.train import config, devices, feasible, opt_state, step
from tests.appliers import pipelines

pytestmark = pytest.mark.usefixtures('quick_compiles')

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / 'goldens/load_balancing.json').read_text())
OPTIONS = Experts(count=GOLDEN['experts'], chosen=GOLDEN['chosen'], width=6)
CONFIG = DecoderConfig(
  family='mixtral',
  vocab=16,
  layers=3,
  embed=8,
  mlp=6,
  q_heads=2,
  kv_heads=1,
  head_dim=4,
  max_length=16,
  experts=OPTIONS,
)
ROWS, LENGTH, FACTOR = 4, 6, 0.5


class Routers(nnx.Module):
  """A router per layer whose logits are what it is called with."""

  def __init__(self, layers):
    made = lambda seed: routing.Router(8, OPTIONS, eps=1e-6, dtype=jnp.float32, rngs=nnx.Rngs(seed))  # noqa: E731
    self.each = nnx.List([made(i) for i in range(layers)])
    for router in self.each:
      router.proj.kernel[...] = jnp.eye(8)

  def __call__(self, layers, counted):
    for router, x in zip(self.each, layers, strict=True):
      router(x, counted)


@pytest.mark.parametrize('calls', (1, 2))
@pytest.mark.parametrize('name', ('all', 'masked'))
def test_the_loss_and_its_gradient_are_those_of_transformers(name, calls):
  """Also where the batch comes in two calls, as microbatches do."""
  logits = jnp.asarray(GOLDEN['logits'], jnp.float32)
  counted = (
    jnp.asarray(GOLDEN['mask'], bool).reshape(-1) if name == 'masked' else jnp.ones(10, bool)
  )
  model = routing.record_routing(Routers(len(logits)))
  parts = peftlab.split(model)

  def loss(logits):
    model = peftlab.merge(parts)
    for x, mine in zip(jnp.split(logits, calls, 1), jnp.split(counted, calls), strict=True):
      model(x, mine)
    return routing.load_balancing_loss(model)

  found, gradient = jax.value_and_grad(loss)(logits)
  np.testing.assert_allclose(found, GOLDEN[name]['loss'], rtol=1e-5)
  np.testing.assert_allclose(gradient, GOLDEN[name]['gradient'], rtol=1e-4, atol=1e-6)


def test_what_was_recorded_is_forgotten_or_left_out():
  logits = jnp.asarray(GOLDEN['logits'], jnp.float32)
  model = routing.record_routing(Routers(2))
  model(-logits, None)
  before = peftlab.merge(peftlab.split(model))
  model(logits, None)
  expected = GOLDEN['all']['loss']
  assert float(routing.load_balancing_loss(model)) != pytest.approx(expected, rel=1e-3)
  assert float(routing.load_balancing_loss(model, since=before)) == pytest.approx(
    expected, rel=1e-4
  )
  again = peftlab.merge(routing.forget(peftlab.split(model)))
  again(logits, None)
  assert float(routing.load_balancing_loss(again)) == pytest.approx(expected, rel=1e-5)


@functools.cache
def batch():
  draw = np.random.default_rng(0)
  tokens = draw.integers(0, CONFIG.vocab, (ROWS, LENGTH)).astype(np.int32)
  segments = np.ones((ROWS, LENGTH), np.int32)
  segments[1, 4:] = segments[2, 2:] = 0  # padding
  return {
    'tokens': jnp.asarray(tokens),
    'targets': jnp.roll(tokens, -1, axis=1),
    'loss_mask': jnp.asarray(segments, jnp.float32),
    'positions': jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH)),
    'segment_ids': jnp.asarray(segments),
  }


@functools.cache
def parts_under(applier, mesh=None, experts='each'):
  """A decoder in training with random adapters on its projections and routers."""
  model = Decoder(CONFIG, rngs=nnx.Rngs(0), applier=applier)
  model = model if mesh is None else _specs.place(model, mesh)[0]
  model.lay_out(mesh)
  model, _ = peftlab.attach(model, LoRA(rank=2), where=('all-linear', 'router'), experts=experts)
  model = peftlab.merge(opt_state.training_parts(model, recording=True))
  if mesh is None:
    # With noise of 0.1 gradients of float32 say little: an ulp of the base moves them by 5e-5.
    return cases.randomized(peftlab.split(model), by=0.05)
  # The values of scan, layer by layer.
  scanned = _parts.flat(parts_under(appliers.Scan(), None, experts).adapter)
  order = np.asarray(getattr(model.layers, 'layer_order', None) or range(CONFIG.layers))
  placed = {}
  for path, array in _parts.flat(peftlab.split(model).adapter).items():
    value = np.asarray(scanned[path])[np.maximum(order, 0)]
    placed[path] = jax.device_put(value, array.sharding)
  return peftlab.split(model).replace(adapter=_parts.nest(placed))


@functools.cache
def gradients(applier, factor, mesh=None, accumulate=1, experts='each'):
  """(loss, {path: gradient by layer}, balance) of a batch."""
  parts = parts_under(applier, mesh, experts)

  @jax.jit
  def run(parts, rows):
    return step.gradients(parts, rows, accumulate, factor)

  with _specs.using(mesh):
    value, grads, state = run(parts, devices.place_batch(batch(), mesh))
  order = getattr(peftlab.merge(parts).layers, 'layer_order', None) or range(CONFIG.layers)
  places = [list(order).index(i) for i in range(CONFIG.layers)]
  found = {path: np.asarray(array)[places] for path, array in _parts.flat(grads).items()}
  balance = routing.load_balancing_loss(peftlab.merge(parts.replace(state=state)))
  return float(value), found, float(balance)


def assert_same(found, expected):
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  np.testing.assert_allclose(found[2], expected[2], rtol=1e-5)
  for path, gradient in expected[1].items():
    cases.assert_close(found[1][path], gradient, _parts.path_name(path), tolerance=1e-5)


def by_hand():
  """The loss of every layer's router, from logits taken layer by layer, without any record."""
  seen = []
  parts = parts_under(appliers.Sequential(), None)
  real = routing.route

  def noted(logits, options, *, correction=None):
    seen.append(np.asarray(logits, np.float64))
    return real(logits, options, correction=correction)

  routing.route = noted
  try:
    model, rows = peftlab.merge(parts), batch()
    model.hidden(rows['tokens'], positions=rows['positions'], segment_ids=rows['segment_ids'])
  finally:
    routing.route = real
  kept = np.asarray(batch()['segment_ids']).reshape(-1) > 0
  logits = np.concatenate([one[kept] for one in seen])
  chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  picks = np.zeros(OPTIONS.count)
  for row in logits:
    picks[np.argsort(-row)[: OPTIONS.chosen]] += 1 / len(logits)
  return OPTIONS.count * float((picks * chances.mean(0)).sum())


def test_it_is_in_the_loss_and_moves_routers():
  plain, balanced = gradients(appliers.Scan(), 0.0), gradients(appliers.Scan(), FACTOR)
  expected = by_hand()
  assert balanced[2] == pytest.approx(expected, rel=1e-5)
  assert balanced[0] - plain[0] == pytest.approx(FACTOR * expected, rel=1e-4)
  path = ('layers', 'mlp', 'router', 'proj', 'adapters', 0, 'b')
  assert cases.distance(balanced[1][path], plain[1][path]) > 1e-3


def test_sequential_equals_scan():
  found = gradients(appliers.Sequential(), FACTOR)
  assert_same(found, gradients(appliers.Scan(), FACTOR))


def test_remat_changes_nothing():
  remat = gradients(appliers.Scan(remat='full'), FACTOR)
  assert_same(remat, gradients(appliers.Scan(), FACTOR))


@pytest.mark.parametrize(('rest', 'experts'), (('last', 'each'), ('pad', 'one')))
def test_a_pipeline_equals_scan(rest, experts):
  mesh = pipelines.mesh(2)
  found = gradients(appliers.Pipeline(microbatches=2, rest=rest), FACTOR, mesh, experts=experts)
  assert_same(found, gradients(appliers.Scan(), FACTOR, experts=experts))


def test_microbatches_have_the_mean_of_their_losses():
  value, _, balance = gradients(appliers.Scan(), FACTOR, accumulate=2)
  plain, _, whole = gradients(appliers.Scan(), 0.0)[0], None, gradients(appliers.Scan(), FACTOR)[2]
  assert balance == pytest.approx(whole, rel=1e-5)  # the metric is that of the batch
  parts = parts_under(appliers.Scan())
  run = jax.jit(lambda parts, rows: step.gradients(parts, rows, 1, FACTOR)[2])
  each = []
  for i in range(2):
    rows = {name: array[i::2] for name, array in batch().items()}
    model = peftlab.merge(parts.replace(state=run(parts, rows)))
    each.append(float(routing.load_balancing_loss(model)))
  assert value == pytest.approx(plain + FACTOR * np.mean(each), rel=1e-5)


def test_a_step_logs_it_and_compiles_once():
  parts = parts_under(appliers.Scan())
  options = opt_state.StepOptions(load_balancing=FACTOR, steps=3)
  parts = parts.replace(adapter=jax.tree.map(jnp.copy, parts.adapter))
  state = opt_state.init_opt_state(parts, options, learning_rate=0.05)
  update, adapter, found = step.step_for(parts, state, options), parts.adapter, []
  for _ in range(3):
    adapter, state, metrics = update(adapter, state, parts.base, batch())
    found.append({name: float(value) for name, value in metrics.items()})
  assert found[0]['load_balancing'] == pytest.approx(by_hand(), rel=1e-5)
  assert found[0]['loss'] == pytest.approx(gradients(appliers.Scan(), FACTOR)[0], rel=1e-5)
  assert len({step['load_balancing'] for step in found}) == 3  # of each step anew
  assert update.traces == 1


def test_it_is_refused_without_a_router():
  base = config.BaseConfig(source='package:glassllm/en')
  with pytest.raises(
    ValueError, match=r'train\.load_balancing is 0\.1, but package:glassllm/en has no'
  ):
    feasible.check(config.Experiment(base=base, train=config.TrainConfig(load_balancing=0.1)))
  with pytest.raises(ValueError, match=r'train\.load_balancing is -1'):
    config.TrainConfig(load_balancing=-1.0)

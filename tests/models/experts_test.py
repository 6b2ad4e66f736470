"""Experts: sorted and dense equal a loop, routing equals arithmetic, a mesh equals one device."""

import dataclasses
import math
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs, appliers, quant
from peftlab.models import routing
from peftlab.models.config import DecoderConfig, Experts
from peftlab.models.decoder import Decoder
from peftlab.models.experts import ExpertDense
from peftlab.models.mlp import ExpertMLP
from peftlab.plugins.lora import LoRA

pytestmark = pytest.mark.usefixtures('quick_compiles')

OPTIONS = Experts(count=8, chosen=3, width=6)
CONFIG = DecoderConfig(
  family='mixtral',
  vocab=16,
  layers=2,
  embed=8,
  mlp=6,
  q_heads=2,
  kv_heads=1,
  head_dim=4,
  max_length=16,
  experts=OPTIONS,
)


@pytest.mark.parametrize('bias', (False, True))
def test_each_row_meets_its_expert(bias):
  layer = ExpertDense(4, {'embed': 6}, {'mlp': 5}, rngs=nnx.Rngs(0), bias=bias)
  if bias:
    layer.bias[...] = jnp.arange(20.0).reshape(4, 5)
  sizes = np.array([2, 0, 4, 3])
  x = jax.random.normal(jax.random.key(1), (9, 6))
  found = layer(x, jnp.asarray(sizes))
  expert = np.repeat(np.arange(4), sizes)
  expected = np.einsum('ti,tio->to', x, np.asarray(layer.kernel[...])[expert])
  if bias:
    expected = expected + np.asarray(layer.bias[...])[expert]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_arrays_of_experts_know_their_axes():
  layer = ExpertDense(4, {'embed': 6}, {'mlp': 5}, rngs=nnx.Rngs(0), bias=True)
  assert layer.kernel.get_metadata()['axes'] == ('experts', 'embed', 'mlp')
  assert layer.bias.get_metadata()['axes'] == ('experts', 'mlp')


def by_loop(mlp, x, weights, chosen):
  """Every token through its experts, one at a time, in float64."""
  gate, up, down = (np.asarray(e.kernel[...], np.float64) for e in (mlp.gate, mlp.up, mlp.down))
  x, y = np.asarray(x, np.float64), np.zeros(x.shape)
  for token, experts in enumerate(np.asarray(chosen)):
    for weight, e in zip(np.asarray(weights)[token], experts, strict=True):
      a = x[token] @ gate[e]
      y[token] += weight * ((a / (1 + np.exp(-a)) * (x[token] @ up[e])) @ down[e])
  return y


@pytest.mark.parametrize('method', ('sorted', 'dense'))
def test_the_sum_over_experts_is_that_of_a_loop(method):
  options = dataclasses.replace(OPTIONS, method=method)
  mlp = ExpertMLP(CONFIG, options, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (2, 5, 8))
  weights, chosen = mlp.router(x.reshape(10, 8))
  expected = by_loop(mlp.experts, x.reshape(10, 8), weights, chosen)
  np.testing.assert_allclose(mlp(x).reshape(10, 8), expected, rtol=1e-4, atol=1e-5)


LOGITS = np.array([[2.0, 1.0, 0.0, -1.0], [0.0, 0.5, 3.0, 0.25]], np.float32)


def softmax(x):
  e = np.exp(x)
  return e / e.sum(-1, keepdims=True)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


ROUTES = {
  'all, then normalized': (dict(), [[0, 1], [2, 1]], softmax),
  'all': (dict(normalize=False), [[0, 1], [2, 1]], None),
  'chosen': (dict(scoring='chosen'), [[0, 1], [2, 1]], softmax),
  'sigmoid, scaled': (
    dict(scoring='sigmoid', scale=2.5),
    [[0, 1], [2, 1]],
    lambda s: 2.5 * sigmoid(s) / sigmoid(s).sum(-1, keepdims=True),
  ),
}


@pytest.mark.parametrize('name', ROUTES)
def test_routes_equal_arithmetic(name):
  fields, experts, of_chosen = ROUTES[name]
  options = Experts(count=4, chosen=2, width=1, **fields)
  weights, chosen = routing.route(jnp.asarray(LOGITS), options)
  np.testing.assert_array_equal(chosen, experts)
  picked = np.take_along_axis(LOGITS, np.array(experts), -1)
  expected = of_chosen(picked) if of_chosen else np.take_along_axis(softmax(LOGITS), chosen, -1)
  np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_a_correction_moves_the_choice_and_not_the_weights():
  options = Experts(count=4, chosen=2, width=1, scoring='sigmoid', normalize=False)
  correction = jnp.asarray([-9.0, 0.0, 0.0, 9.0])
  weights, chosen = routing.route(jnp.asarray(LOGITS), options, correction=correction)
  np.testing.assert_array_equal(chosen, [[3, 1], [3, 2]])
  np.testing.assert_allclose(weights, sigmoid(np.take_along_axis(LOGITS, chosen, -1)), rtol=1e-5)


def test_the_groups_with_the_best_two_experts_are_chosen_from():
  # Groups (0 1) (2 3) (4 5): sums of two 1.1, 1.2, 0.9: the best single expert is left out.
  scores = jnp.asarray([[0.2, 0.9, 0.6, 0.6, 0.95, -0.05]])
  logits = jnp.log(scores.clip(1e-3) / (1 - scores.clip(1e-3)))
  options = Experts(count=6, chosen=2, width=1, scoring='sigmoid', groups=3, chosen_groups=1)
  assert set(np.asarray(routing.route(logits, options)[1][0]).tolist()) == {2, 3}


def run(parts, tokens):
  return peftlab.merge(parts)(tokens)


def test_experts_on_a_mesh_equal_experts_on_one_device():
  model = jax.jit(lambda: peftlab.split(Decoder(CONFIG, rngs=nnx.Rngs(0))))()
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (8, 6)))
  grad = jax.jit(jax.value_and_grad(lambda b, t: jnp.mean(run(model.replace(base=b), t) ** 2)))
  base = jax.tree.map(lambda a: a, model.base)
  floats = lambda tree: jax.tree.map(lambda a: np.asarray(a, np.float64), tree)  # noqa: E731
  loss, grads = grad(base, tokens)
  mesh = _specs.make_mesh({'expert': 4, 'fsdp': 2})
  placed, dropped = _specs.place(peftlab.merge(model), mesh)
  up = placed.layers.mlp.experts.up.kernel.get_raw_value()
  assert up.sharding.spec == jax.sharding.PartitionSpec(None, 'expert', 'fsdp', None)
  assert {d.axis for d in dropped} <= {'fsdp'}
  with jax.set_mesh(mesh):
    found, found_grads = grad(peftlab.split(placed).base, tokens)
  np.testing.assert_allclose(found, loss, rtol=1e-5)
  chex.assert_trees_all_close(floats(found_grads), floats(grads), rtol=1e-3, atol=1e-6)


def adapted_experts(dropout=0.0):
  """Parts of a model with int8 experts and LoRA on every layer, which every row can tell."""
  config = dataclasses.replace(CONFIG, embed=64, q_heads=4, kv_heads=4)
  model, _ = quant.quantize(Decoder(config, rngs=nnx.Rngs(0)), 'int8')
  model, _ = peftlab.attach(model, LoRA(rank=2, dropout=dropout), where='all-linear')
  model.train()
  return moved(peftlab.split(model))


def moved(parts):
  """The parts with factors that are not 0."""
  keys = iter(jax.random.split(jax.random.key(1), 1000))
  leaves = {
    path: jax.random.normal(next(keys), a.shape) * 0.05 if path[-1] in ('a', 'b') else a
    for path, a in _parts.flat(parts.adapter).items()
  }
  return parts.replace(adapter=_parts.nest(leaves))


def adapter_gradient(parts, tokens):
  """(loss and what the pass left in the state, gradients of the adapter), to be jitted."""

  def loss(adapter):
    model = peftlab.merge(parts.replace(adapter=adapter))
    loss = jnp.mean(model(tokens) ** 2)
    return loss, _parts.split(model).state

  return jax.value_and_grad(loss, has_aux=True)(parts.adapter)


def moved_shapes(text):
  """[(dtype, shape)] of what the collectives of a compiled program give."""
  found = re.findall(
    r'= \(?(\w+)\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all|reduce-)', text
  )
  return [(kind, tuple(int(n) for n in shape.split(',') if n)) for kind, shape in found]


@pytest.mark.parametrize('sizes', ({'fsdp': 8}, {'data': 2, 'fsdp': 2, 'tensor': 2}, {'fsdp': 4}))
def test_rows_are_sorted_where_they_are_and_codes_travel(sizes):
  """Under FSDP no sorted row crosses devices, and experts are gathered as codes."""
  parts = adapted_experts()
  rows, length = 8, 6
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (rows, length)))
  expected = jax.jit(adapter_gradient)(parts, tokens)
  count = math.prod(sizes.values())
  mesh = _specs.make_mesh(sizes, jax.devices()[:count])
  placed = peftlab.split(_specs.place(peftlab.merge(parts), mesh)[0])
  with jax.set_mesh(mesh):
    program = jax.jit(adapter_gradient).lower(placed, tokens).compile()
    found = program(placed, tokens)
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-5)
  chex.assert_trees_all_close(
    jax.device_get(found[1]), jax.device_get(expected[1]), rtol=2e-4, atol=1e-6
  )
  shapes = moved_shapes(program.as_text())
  one = math.prod(n for name, n in sizes.items() if name != 'tensor')
  sorted_rows = {n * length * OPTIONS.chosen for n in (rows, rows // one)}
  assert not [shape for _, shape in shapes if sorted_rows.intersection(shape)]
  kernels = [kind for kind, shape in shapes if OPTIONS.count in shape and 64 in shape]
  assert 's8' in kernels
  large = [
    s for k, s in shapes if k == 'f32' and math.prod(s) >= OPTIONS.count * 64 * OPTIONS.width
  ]
  assert not large


def test_stages_of_a_pipeline_sort_their_own_rows():
  """A manual axis within a manual axis."""
  parts = adapted_experts()
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (16, 6)))
  expected = jax.jit(adapter_gradient)(parts, tokens)
  mesh = _specs.make_mesh({'stage': 2, 'fsdp': 4})
  model, _ = _specs.place(peftlab.merge(parts), mesh)
  model.applier = appliers.Pipeline(microbatches=2)
  with jax.set_mesh(mesh):
    model.lay_out(mesh)
    found = jax.jit(adapter_gradient)(peftlab.split(model), tokens)
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-5)
  chex.assert_trees_all_close(
    jax.device_get(found[1]), jax.device_get(expected[1]), rtol=2e-4, atol=1e-6
  )


def test_a_batch_that_the_mesh_does_not_divide_gives_the_same():
  parts = adapted_experts()
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (3, 5)))
  expected = jax.jit(adapter_gradient)(parts, tokens)
  mesh = _specs.make_mesh({'fsdp': 8})
  placed = peftlab.split(_specs.place(peftlab.merge(parts), mesh)[0])
  with jax.set_mesh(mesh):
    found = jax.jit(adapter_gradient)(placed, tokens)
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-5)
  chex.assert_trees_all_close(
    jax.device_get(found[1]), jax.device_get(expected[1]), rtol=2e-4, atol=1e-6
  )


def test_devices_drop_other_numbers_of_their_rows_and_count_one_draw():
  """Equal tokens on all devices: with one mask for all, their logits would be equal."""
  parts = adapted_experts(dropout=0.5)
  tokens = jnp.ones((8, 6), jnp.int32)
  mesh = _specs.make_mesh({'fsdp': 8})
  placed = peftlab.split(_specs.place(peftlab.merge(parts), mesh)[0])

  def call(parts):
    model = peftlab.merge(parts)
    for path, layer in nnx.iter_graph(model):  # dropout in the experts alone
      if hasattr(layer, 'adapter') and 'experts' not in path:
        layer.eval()
    return model(tokens), _parts.split(model).state

  with jax.set_mesh(mesh):
    logits, state = jax.jit(call)(placed)
  logits = np.asarray(logits)
  assert all(np.abs(logits[0] - logits[i]).max() > 1e-4 for i in range(1, 8))
  drawn = {
    path: np.asarray(a) - np.asarray(_parts.flat(parts.state)[path])
    for path, a in _parts.flat(state).items()
    if path[-1] == 'rng_count' and 'experts' in path
  }
  assert drawn
  assert all((count == 1).all() for count in drawn.values())


def by_hand(logits, chosen, count):
  """Switch Transformers eq. 4 to 6 over all rows, as the Hugging Face loss sums it."""
  picks = np.zeros(count)
  for row in chosen:
    for e in row:
      picks[e] += 1 / len(chosen)
  return count * np.sum(picks * softmax(logits).mean(0))


@pytest.mark.parametrize('applier', (appliers.Scan(), appliers.Sequential()))
def test_the_balance_of_load_is_recorded_per_layer(applier):
  model = Decoder(CONFIG, rngs=nnx.Rngs(0), applier=applier)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 6)))
  recording = routing.record_routing(model)
  assert peftlab.assert_base_shared(model, recording)

  @jax.jit
  def record(parts):
    model = peftlab.merge(parts)
    model(tokens)
    return routing.load_balancing_loss(model), peftlab.split(model).state

  loss, state = record(peftlab.split(recording))
  router = state['layers']['mlp']['router']
  chex.assert_shape([router['choices'], router['probabilities']], (2, 8))
  np.testing.assert_allclose(router['choices'].sum(-1), 3, rtol=1e-5)
  np.testing.assert_allclose(router['probabilities'].sum(-1), 1, rtol=1e-5)
  picks, means = (router[n].mean(0) for n in ('choices', 'probabilities'))
  assert float(loss) == pytest.approx(8 * float((picks * means).sum()), rel=1e-5)


def test_the_balance_of_load_of_one_router_is_the_published_formula():
  router = routing.Router(8, OPTIONS, eps=1e-6, dtype=jnp.float32, rngs=nnx.Rngs(0))
  router = routing.record_routing(router)
  x = jax.random.normal(jax.random.key(1), (20, 8))
  _, chosen = router(x)
  expected = by_hand(np.asarray(router.proj(x), np.float64), np.asarray(chosen), 8)
  assert float(routing.load_balancing_loss(router)) == pytest.approx(expected, rel=1e-5)


def test_no_record_and_no_router_are_named():
  model = Decoder(CONFIG, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match='keeps no record of its routing; see record_routing'):
    routing.load_balancing_loss(model)
  with pytest.raises(ValueError, match='Linear has no router'):
    routing.record_routing(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
  ('fields', 'message'),
  (
    (dict(chosen=9), r'Experts\.chosen is 9; there are 8 to choose from'),
    (dict(groups=3), r'Experts\.count is 8; 3 groups do not divide it'),
    (dict(groups=2, chosen_groups=3), r'Experts\.chosen_groups is 3 of 2 groups'),
    (dict(groups=4, chosen_groups=1), r'Experts\.chosen is 3; there are 2 to choose from'),
    (dict(scoring='softmx'), r"Experts\.scoring is 'softmx'; did you mean 'softmax'"),
    (dict(width=0), r'Experts\.width is 0; it must be an integer above 0'),
  ),
)
def test_bad_options_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(OPTIONS, **fields)

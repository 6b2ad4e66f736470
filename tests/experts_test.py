"""Adapters on experts: each expert has arrays of its own, and meets only the rows routed to it."""

import dataclasses

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _groups, appliers, testing
from peftlab.formats import adapter_values, layer_names
from peftlab.formats.safetensors_file import SafetensorsFile
from peftlab.models.experts import ExpertDense
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from tests.testing.broken_plugins import LowRank

pytestmark = pytest.mark.usefixtures('quick_compiles')

EXPERTS, INS, OUTS, LAYERS = 4, 6, 6, 3
# What each of 4 experts gets: uneven, one with nothing, all rows to one.
ROUTINGS = ([3, 0, 5, 2], [0, 0, 0, 9], [1, 1, 1, 1])


def layer(rngs, *, bias=True):
  made = ExpertDense(EXPERTS, {'embed': INS}, {'mlp': OUTS}, rngs=rngs, bias=bias)
  if bias:
    made.bias[...] = jax.random.normal(rngs.params(), made.bias.shape)
  return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotated(LowRank):
  """Multiplies another input than its own, and reads the kernel: y = sin(x) W + x (A B + W / 2)."""

  identity_at_start = False

  def apply(self, x, base, p):
    return base(jnp.sin(x)) + x @ (p.scale * p.a @ p.b + base.weight() / 2)


def reference(adapter, kernel, bias, p, x):
  """One expert, written out."""
  if isinstance(adapter, LoRA):
    return x @ kernel + p['scale'] * (x @ p['a']) @ p['b'] + bias
  return np.sin(x) @ kernel + x @ (p['scale'] * p['a'] @ p['b'] + kernel / 2) + bias


def randomized(model):
  return cases.randomized(peftlab.split(model))


@pytest.mark.parametrize('routing', ROUTINGS)
def test_rows_lie_in_blocks_of_one_group_and_come_back(routing):
  rows = sum(routing)
  x = jnp.arange(rows * 2.0).reshape(rows, 2) + 1
  blocks = _groups.Blocks.of(jnp.asarray(routing), rows)
  inside = np.asarray(blocks.enter(x))
  np.testing.assert_array_equal(blocks.leave(inside), x)
  owner = np.repeat(np.arange(len(routing)), routing)
  for block, group in zip(inside, np.asarray(blocks.group), strict=True):
    for row in block[block[:, 0] > 0]:
      assert owner[int(np.argmax(np.all(np.asarray(x) == row, axis=1)))] == group


@pytest.mark.parametrize('routing', ROUTINGS)
@pytest.mark.parametrize('adapter', (LoRA(rank=2), Rotated(rank=2)), ids=lambda a: type(a).__name__)
def test_every_expert_has_its_own_adapter(adapter, routing):
  model, report = peftlab.attach(layer(nnx.Rngs(0)), adapter)
  assert report.trainable == EXPERTS * 2 * (INS + OUTS)
  parts = randomized(model)
  p, base = parts.adapter['adapters'][0], parts.base
  assert p['a'].shape == (EXPERTS, INS, 2)
  rows = sum(routing)
  x = np.asarray(jax.random.normal(jax.random.key(1), (rows, INS)))
  y = peftlab.merge(parts)(x, jnp.asarray(routing))
  start = 0
  for expert, count in enumerate(routing):
    own = {name: np.asarray(value)[expert] for name, value in p.items()}
    kernel, bias = (np.asarray(base[n])[expert] for n in ('kernel', 'bias'))
    mine = slice(start, start + count)
    expected = reference(adapter, kernel, bias, own, x[mine])
    np.testing.assert_allclose(y[mine], expected, rtol=2e-5, atol=2e-5)
    start += count


def test_only_experts_with_rows_get_gradients():
  model, _ = peftlab.attach(layer(nnx.Rngs(0)), LoRA(rank=2))
  parts = randomized(model)
  x = jax.random.normal(jax.random.key(1), (8, INS))

  def loss(adapter):
    return jnp.sum(peftlab.merge(parts.replace(adapter=adapter))(x, jnp.asarray([3, 0, 5, 0])) ** 2)

  gradient = np.asarray(jax.jit(jax.grad(loss))(parts.adapter)['adapters'][0]['a'])
  moved = np.abs(gradient).max(axis=(1, 2)) > 0
  np.testing.assert_array_equal(moved, [True, False, True, False])


def body(block, x, sizes):
  return jnp.tanh(block(x, sizes))


def stacked(axis):
  return peftlab.stack(layer, LAYERS, rngs=nnx.Rngs(0), axis=axis)


@pytest.mark.parametrize('axis', (0, 1))
def test_scan_equals_sequential_and_layers_apart(axis):
  model, report = peftlab.attach(stacked(axis), LoRA(rank=2))
  assert report.trainable == LAYERS * EXPERTS * 2 * (INS + OUTS)
  parts = randomized(model)
  held = parts.adapter['adapters'][0]
  assert held['a'].shape == ((3, 4, 6, 2) if axis == 0 else (4, 3, 6, 2))
  x, sizes = jax.random.normal(jax.random.key(1), (10, INS)), jnp.asarray([3, 0, 5, 2])
  ys = [
    applier(axis=axis).apply(parts, x, body, sizes)[0]
    for applier in (appliers.Scan, appliers.Sequential)
  ]
  np.testing.assert_allclose(ys[0], ys[1], rtol=1e-5, atol=1e-6)
  expected = np.asarray(x)
  for i in range(LAYERS):
    take = lambda a, i=i: np.take(np.asarray(a), i, axis=axis)  # noqa: E731
    kernel, bias = take(parts.base['kernel']), take(parts.base['bias'])
    own = {name: take(value) for name, value in held.items()}
    owner = np.repeat(np.arange(EXPERTS), sizes)
    expected = np.tanh(
      np.stack(
        [
          reference(LoRA(), kernel[e], bias[e], {n: v[e] for n, v in own.items()}, row[None])[0]
          for e, row in zip(owner, expected, strict=True)
        ]
      )
    )
  np.testing.assert_allclose(ys[0], expected, rtol=1e-4, atol=1e-5)


def test_the_first_values_differ_per_expert_and_per_layer():
  model, _ = peftlab.attach(stacked(0), LoRA(rank=2))
  values = np.asarray(model.adapters[0].a[...]).reshape(LAYERS * EXPERTS, -1)
  assert len(np.unique(values.round(6), axis=0)) == LAYERS * EXPERTS


def test_an_adapter_of_experts_goes_to_a_folder_and_back(tmp_path):
  base = stacked(0)
  model = peftlab.merge(randomized(peftlab.attach(base, LoRA(rank=2))[0]))
  peftlab.save_adapter(model, tmp_path / 'a')
  again = peftlab.load_adapter(base, tmp_path / 'a')
  for name in ('a', 'b', 'scale'):
    np.testing.assert_array_equal(
      getattr(again.adapters[0], name)[...], getattr(model.adapters[0], name)[...]
    )


def test_arrays_of_experts_lie_where_their_experts_lie():
  mesh = testing.mesh(expert=4, tensor=2) if hasattr(testing, 'mesh') else None
  mesh = mesh or peftlab._specs.make_mesh({'expert': 4, 'tensor': 2})
  base, _ = peftlab._specs.place(stacked(0), mesh)
  model, _ = peftlab.attach(base, LoRA(rank=2))
  assert tuple(model.adapters[0].a[...].sharding.spec)[:2] == (None, 'expert')
  assert peftlab.assert_base_shared(base, model) == '2/2'
  parts = randomized(model)
  x, sizes = jax.random.normal(jax.random.key(1), (10, INS)), jnp.asarray([3, 0, 5, 2])
  alone = jax.tree.map(np.asarray, parts)
  with peftlab._specs.using(mesh):
    there = appliers.Scan().apply(parts, x, body, sizes)[0]
  here = appliers.Scan().apply(alone, x, body, sizes)[0]
  np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-6)


def test_dropout_differs_between_the_rows_of_a_block():
  model, _ = peftlab.attach(layer(nnx.Rngs(0)), LoRA(rank=2, dropout=0.5))
  model = peftlab.merge(randomized(model))
  x, sizes = jnp.ones((32, INS)), jnp.asarray([32, 0, 0, 0])
  y = np.asarray(model(x, sizes))
  assert len(np.unique(y.round(5), axis=0)) > 8
  model.eval()
  y = np.asarray(model(x, sizes))
  assert len(np.unique(y.round(5), axis=0)) == 1


# One set of arrays for all experts.


def one_for_all(axis=None, adapter=None, **more):
  base = layer(nnx.Rngs(0)) if axis is None else stacked(axis)
  return peftlab.attach(base, adapter or LoRA(rank=2), experts='one', **more)


@pytest.mark.parametrize('routing', ROUTINGS)
@pytest.mark.parametrize('adapter', (LoRA(rank=2), Rotated(rank=2)), ids=lambda a: type(a).__name__)
def test_all_experts_can_share_one_adapter(adapter, routing):
  model, report = one_for_all(adapter=adapter)
  assert report.trainable == 2 * (INS + OUTS)
  assert report.rows[0].experts == 'one'
  parts = randomized(model)
  p, base = {n: np.asarray(v) for n, v in parts.adapter['adapters'][0].items()}, parts.base
  assert p['a'].shape == (INS, 2)
  x = np.asarray(jax.random.normal(jax.random.key(1), (sum(routing), INS)))
  y = peftlab.merge(parts)(x, jnp.asarray(routing))
  owner = np.repeat(np.arange(EXPERTS), routing)
  for row, expert, found in zip(x, owner, np.asarray(y), strict=True):
    kernel, bias = (np.asarray(base[n])[expert] for n in ('kernel', 'bias'))
    expected = reference(adapter, kernel, bias, p, row[None])[0]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('axis', (0, 1))
def test_a_shared_set_under_scan_equals_sequential_and_layers_apart(axis):
  model, report = one_for_all(axis)
  assert report.trainable == LAYERS * 2 * (INS + OUTS)
  parts = randomized(model)
  held = {n: np.asarray(v) for n, v in parts.adapter['adapters'][0].items()}
  assert held['a'].shape == (LAYERS, INS, 2)
  x, sizes = jax.random.normal(jax.random.key(1), (10, INS)), jnp.asarray([3, 0, 5, 2])

  def run(adapter, applier):
    y, _ = applier.apply(parts.replace(adapter=adapter), x, body, sizes)
    return jnp.sum(y**2), y

  both = [
    jax.value_and_grad(run, has_aux=True)(parts.adapter, applier(axis=axis))
    for applier in (appliers.Scan, appliers.Sequential)
  ]
  chex.assert_trees_all_close(*both, rtol=1e-4, atol=1e-5)
  expected, owner = np.asarray(x), np.repeat(np.arange(EXPERTS), sizes)
  for i in range(LAYERS):
    kernel, bias = (np.take(np.asarray(parts.base[n]), i, axis=axis) for n in ('kernel', 'bias'))
    own = {name: value[i] for name, value in held.items()}
    rows = [
      reference(LoRA(), kernel[e], bias[e], own, row[None])[0]
      for e, row in zip(owner, expected, strict=True)
    ]
    expected = np.tanh(np.stack(rows))
  np.testing.assert_allclose(both[0][0][1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('experts', ('each', 'one'))
@pytest.mark.parametrize('axis', (None, 0, 1))
def test_what_is_merged_into_kernels_is_the_adapter_of_each_expert(axis, experts):
  base = layer(nnx.Rngs(0)) if axis is None else stacked(axis)
  model, _ = peftlab.attach(base, LoRA(rank=2), experts=experts)
  parts = randomized(model)
  fused = peftlab.fuse.fuse(peftlab.merge(parts))
  a, b, scale = (np.asarray(parts.adapter['adapters'][0][n]) for n in ('a', 'b', 'scale'))
  change = np.einsum('...ir,...ro->...io', a * scale[..., None, None], b)
  if experts == 'one':
    change = np.expand_dims(change, 0 if axis in (None, 1) else 1)
  expected = np.asarray(base.kernel[...]) + change
  np.testing.assert_allclose(fused.kernel[...], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(('there', 'here'), ((0, 1), (1, 0)))
def test_a_shared_set_goes_to_a_folder_and_into_another_layout(tmp_path, there, here):
  model = peftlab.merge(randomized(one_for_all(there)[0]))
  peftlab.save_adapter(model, tmp_path / 'a')
  again = peftlab.load_adapter(stacked(here), tmp_path / 'a', any_base=True)
  assert again.adapters[0].one
  for name in ('a', 'b', 'scale'):
    found, saved = (getattr(m.adapters[0], name)[...] for m in (again, model))
    np.testing.assert_array_equal(found, saved)
  names = SafetensorsFile(tmp_path / 'a' / 'adapter_model.safetensors')
  assert len(names) == LAYERS * 2  # not once for each expert


def test_arrays_for_each_expert_and_for_all_are_refused_together():
  both = {}
  for model in (one_for_all(0)[0], peftlab.attach(stacked(0), LoRA(rank=2))[0]):
    both |= adapter_values.collect(model, 'default')[1]
  base = stacked(0)
  known, kinds = layer_names.places(base, one=True), dict.fromkeys(both, LoRA(rank=2))
  with pytest.raises(ValueError, match=r'F has arrays of .* both for each expert and for all of'):
    adapter_values.plans_and_arrays(base, 'x', both, kinds, known=known, subject='F')


@pytest.mark.parametrize('words', (('one', 'one'), ('one', 'each')))
def test_weighted_merges_know_who_shares(words):
  model, deltas = stacked(0), 0.0
  for i, word in enumerate(words):
    model, _ = peftlab.attach(model, LoRA(rank=1 + i), name=f'n{i}', experts=word, rngs=i)
  parts = randomized(model)
  for i, word in enumerate(words):
    p = {n: np.asarray(v) for n, v in parts.adapter['adapters'][i].items()}
    delta = np.einsum('...ir,...ro->...io', p['a'] * p['scale'][..., None, None], p['b'])
    deltas = deltas + (0.5 + i) * (delta if word == 'each' else delta[:, None])
  merged, _ = peftlab.fuse.combine(peftlab.merge(parts), {'n0': 0.5, 'n1': 1.5}, name='sum')
  attached = merged.adapters[2]
  assert attached.one == (words == ('one', 'one'))
  a, b, scale = (np.asarray(getattr(attached, n)[...]) for n in ('a', 'b', 'scale'))
  found = np.einsum('...ir,...ro->...io', a * scale[..., None, None], b)
  found = found[:, None] if attached.one else found
  np.testing.assert_allclose(*np.broadcast_arrays(found, deltas), rtol=1e-4, atol=1e-5)


def test_a_shared_set_lies_on_all_devices_of_the_experts():
  mesh = peftlab._specs.make_mesh({'expert': 4, 'tensor': 2})
  base, _ = peftlab._specs.place(stacked(0), mesh)
  model, _ = peftlab.attach(base, LoRA(rank=2), experts='one')
  kernel, b = base.kernel[...].sharding.spec, model.adapters[0].b[...].sharding.spec
  assert (tuple(kernel), tuple(b)) == ((None, 'expert', None, 'tensor'), (None, None, 'tensor'))
  parts = randomized(model)
  x, sizes = jax.random.normal(jax.random.key(1), (10, INS)), jnp.asarray([3, 0, 5, 2])

  def loss(adapter, parts):
    y, _ = appliers.Scan().apply(parts.replace(adapter=adapter), x, body, sizes)
    return jnp.sum(y**2)

  alone = jax.tree.map(np.asarray, parts)
  with peftlab._specs.using(mesh):
    there = jax.jit(jax.value_and_grad(loss))(parts.adapter, parts)
  here = jax.jit(jax.value_and_grad(loss))(alone.adapter, alone)
  chex.assert_trees_all_close(
    *(jax.tree.map(np.asarray, t) for t in (there, here)), rtol=1e-4, atol=1e-5
  )


def test_dropout_of_a_shared_set_differs_between_rows():
  model = peftlab.merge(randomized(one_for_all(adapter=LoRA(rank=2, dropout=0.5))[0]))
  assert model.adapters[0].rng_key.shape == ()
  x, sizes = jnp.ones((32, INS)), jnp.asarray([16, 0, 16, 0])
  assert len(np.unique(np.asarray(model(x, sizes)).round(5), axis=0)) > 8


class Two(nnx.Module):
  """Two layers of experts and a plain one."""

  def __init__(self):
    self.up, self.down = layer(nnx.Rngs(0)), layer(nnx.Rngs(1))
    self.plain = nnx.Linear(INS, OUTS, rngs=nnx.Rngs(2))


def test_patterns_say_whose_experts_share():
  model, report = peftlab.attach(Two(), LoRA(rank=2), experts={'up': 'one'})
  assert {row.path: row.experts for row in report.rows} == {
    'up': 'one',
    'down': 'each',
    'plain': '',
  }
  assert 'experts' in report.table().splitlines()[0]
  assert model.up.adapters[0].a.shape == (INS, 2)
  _, report = peftlab.attach(Two(), LoRA(rank=2), experts={'down': 'each', '': 'one'})
  assert {row.path: row.experts for row in report.rows} == {
    'up': 'one',
    'down': 'each',
    'plain': '',
  }

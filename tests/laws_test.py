"""Laws 1 to 4 and 8 of docs/design.md on 8 devices: identity, budget, direction, type, trace."""

import functools
import gc
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import peftlab
from peftlab import _parts, _specs, testing
from peftlab.appliers import Scan, Sequential
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases

pytestmark = pytest.mark.usefixtures('quick_compiles')

MESHES = tuple(testing.meshes())
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


@functools.cache
def placed(mesh, applier='scan'):
  """(model on the mesh, its input there)."""
  mesh = testing.meshes()[mesh]
  model, _ = _specs.place(testing.StackModel(applier=applier), mesh)
  return model, jax.device_put(cases.stack_input(), NamedSharding(mesh, P(('fsdp', 'tensor'))))


def _step(adapter, opt_state, parts, x):
  def loss(adapter):
    return jnp.mean(jnp.square(peftlab.merge(parts.replace(adapter=adapter))(x)))

  value, gradients = jax.value_and_grad(loss)(adapter)
  updates, opt_state = OPTIMIZER.update(gradients, opt_state)
  return optax.apply_updates(adapter, updates), opt_state, value


step = jax.jit(_step, donate_argnums=(0, 1))


@pytest.mark.parametrize('applier', ('scan', 'sequential'))
@pytest.mark.parametrize('mesh', MESHES)
def test_law_1_the_base_is_the_same_objects_through_it_all(mesh, applier, tmp_path):
  base, x = placed(mesh, applier)
  model, _ = peftlab.attach(base, LoRA(rank=2))
  other, _ = peftlab.attach(base, LoRA(rank=2), rngs=1, name='other')
  parts = peftlab.split(model)
  adapter, _, first = step(parts.adapter, OPTIMIZER.init(parts.adapter), parts, x)
  assert jnp.isfinite(first)
  trained = peftlab.merge(parts.replace(adapter=adapter))
  peftlab.save_adapter(trained, tmp_path / 'adapter')
  loaded = peftlab.load_adapter(base, tmp_path / 'adapter')
  swapped = peftlab.merge(parts.replace(adapter=peftlab.split(other).adapter))
  for after in (model, other, trained, loaded, swapped, peftlab.detach(loaded)):
    assert peftlab.assert_base_shared(base, after) == '4/4'
  chex.assert_trees_all_equal(peftlab.split(loaded).adapter, adapter)


def live_bytes():
  gc.collect()
  return peftlab.nbytes(jax.live_arrays())


@pytest.mark.parametrize('mesh', MESHES)
def test_law_2_n_adapters_cost_the_base_and_their_own_bytes(mesh):
  base, x = placed(mesh)
  peftlab.attach(base, LoRA(rank=2))  # what compiling leaves behind
  for count in (1, 3):
    before = live_bytes()
    held = [peftlab.split(peftlab.attach(base, LoRA(rank=2), rngs=i)[0]) for i in range(count)]
    assert live_bytes() - before == sum(peftlab.nbytes(parts.adapter) for parts in held)
    assert peftlab.nbytes(held) == peftlab.nbytes(base) + count * peftlab.nbytes(held[0].adapter)
    del held
  # a and b of both layers lie in 8 pieces; only the scales are on every device
  parts = peftlab.split(peftlab.attach(base, LoRA(rank=2))[0])
  assert peftlab.nbytes(parts.adapter) == 4 * (2 * 2 * 2 * (16 + 24) + 8 * 2 * 2)
  del x


@pytest.mark.parametrize('applier', ('scan', 'sequential'))
def test_law_3_the_base_is_never_donated_and_never_a_result(applier):
  base, x = placed('fsdp4_tensor2', applier)
  parts = peftlab.split(peftlab.attach(base, LoRA(rank=2))[0])
  arguments = (parts.adapter, OPTIMIZER.init(parts.adapter), parts.replace(adapter={}), x)
  lowered = step.lower(*arguments)
  text = lowered.as_text()
  (signature,) = re.findall(r'func.func public @main\((.*?)\) -> ', text, re.DOTALL)
  given = re.split(r'(?=%arg\d+: )', signature)[1:]
  trained = jax.tree.leaves(arguments[:2])
  assert len(given) == len(jax.tree.leaves(arguments))
  donated = [i for i, a in enumerate(given) if 'tf.aliasing_output' in a or 'buffer_donor' in a]
  assert donated == list(range(len(trained)))
  results = [leaf.shape for leaf in jax.tree.leaves(lowered.out_info)]
  assert results == [leaf.shape for leaf in trained] + [()]


@pytest.mark.parametrize('applier', (Scan(), Sequential()), ids=str)
def test_law_3_holds_for_an_applier_under_jit(applier):
  base, x = placed('fsdp4_tensor2')
  parts = peftlab.split(peftlab.attach(base, LoRA(rank=2))[0].layers)
  run = jax.jit(lambda parts, x: applier.apply(parts, x, lambda layer, x: layer(x)))
  _, created = run(parts, x)
  assert (created.adapter, created.base, created.state, created.gone) == ({}, {}, {}, ())
  assert created.graph == parts.graph


def test_law_3_gradients_hold_no_array_of_the_size_of_a_base_array():
  parts = peftlab.split(peftlab.attach(testing.StackModel(), LoRA(rank=2))[0])
  x = cases.stack_input()
  jaxpr = jax.make_jaxpr(_step)(parts.adapter, OPTIMIZER.init(parts.adapter), parts, x)
  assert [v.aval.shape for v in jaxpr.jaxpr.outvars].count((2, 16, 24)) == 0
  base = jax.jit(jax.grad(lambda b: jnp.sum(peftlab.merge(parts.replace(base=b))(x))))
  assert jax.eval_shape(base, parts.base)['layers']['up']['kernel'].shape == (2, 16, 24)


class Misnamed(nnx.Module):
  """Names that lie: law 4 reads the types."""

  def __init__(self):
    self.lora_a = nnx.Param(jnp.zeros((2,)))
    self.adapters = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
    self.kernel = peftlab.AdapterParam(jnp.zeros((3,)))
    self.embedding = nnx.LoRAParam(jnp.zeros((4,)))
    self.bias = peftlab.AdapterConstant(jnp.zeros(()))


def test_law_4_the_type_decides_and_never_the_name():
  parts = peftlab.split(Misnamed())
  assert sorted(map(_parts.path_name, _parts.flat(parts.adapter))) == [
    'bias',
    'embedding',
    'kernel',
  ]
  assert sorted(map(_parts.path_name, _parts.flat(parts.base))) == [
    'adapters.0.bias',
    'adapters.0.kernel',
    'lora_a',
  ]
  assert issubclass(peftlab.AdapterParam, nnx.LoRAParam)


def test_law_8_name_seed_scale_and_learning_rate_compile_nothing():
  chex.clear_trace_counter()
  base, x = placed('fsdp4_tensor2')

  def train(adapter, parts, x, rate):
    def loss(a):
      return jnp.mean(jnp.square(peftlab.merge(parts.replace(adapter=a))(x)))

    return jax.tree.map(lambda a, g: a - rate * g, adapter, jax.grad(loss)(adapter))

  train = jax.jit(chex.assert_max_traces(train, n=1))
  for seed, (alpha, name, rate) in enumerate(((1.0, 'a', 0.1), (7.0, 'b', 0.2), (7.0, 'c', 0.3))):
    adapter = LoRA(rank=2, alpha=alpha, rslora=seed == 2)
    parts = peftlab.split(peftlab.attach(base, adapter, rngs=seed, name=name)[0])
    rest = parts.replace(adapter={})
    after = train(parts.adapter, rest, x, jnp.float32(rate))
    where = jax.tree.map(lambda a: a.sharding, parts.adapter)
    again = train(jax.device_put(after, where), rest, x, jnp.float32(rate))
    assert jax.tree.all(jax.tree.map(lambda a: bool(jnp.all(jnp.isfinite(a))), again))


def test_another_rank_is_another_program():
  """The counter of the test above would see it."""
  chex.clear_trace_counter()
  run = jax.jit(chex.assert_max_traces(lambda parts, x: peftlab.merge(parts)(x), n=1))
  run(peftlab.split(peftlab.attach(testing.StackModel(), LoRA(rank=2))[0]), cases.stack_input())
  with pytest.raises(AssertionError, match='traced > 1 times'):
    run(peftlab.split(peftlab.attach(testing.StackModel(), LoRA(rank=3))[0]), cases.stack_input())


@pytest.mark.parametrize('kind', (AxisType.Auto, AxisType.Explicit), ids=str)
def test_a_mesh_set_outside_is_never_set_again(kind):
  """Forward and gradient under jax.set_mesh, Auto and Explicit, equal those of one device."""
  mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(kind,))
  model, _ = peftlab.attach(testing.StackModel(), LoRA(rank=2))
  parts = cases.randomized(peftlab.split(model))
  x = cases.stack_input()
  expected = cases.outputs_and_gradients(parts, x)
  everywhere = NamedSharding(mesh, P())
  with jax.set_mesh(mesh):
    x = jax.device_put(x, NamedSharding(mesh, P('fsdp')))
    got = cases.outputs_and_gradients(jax.device_put(parts, everywhere), x)
  for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    cases.assert_close(np.asarray(found), np.asarray(wanted), str(kind), tolerance=3e-5)

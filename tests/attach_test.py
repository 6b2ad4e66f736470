"""Attach, detach, activate: what they give and what they leave alone."""

import dataclasses

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import peftlab
from peftlab import _attach, _parts, _specs, testing
from peftlab.models import layers
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from tests.testing.broken_plugins import LowRank

pytestmark = pytest.mark.usefixtures('quick_compiles')

LORA = LoRA(rank=2)


class Two(nnx.Module):
  """Two layers one after the other."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.up = nnx.Linear(6, 10, rngs=rngs)
    self.down = nnx.Linear(10, 6, rngs=rngs)

  def __call__(self, x):
    return self.down(jnp.tanh(self.up(x)))


def once():
  return peftlab.attach(Two(), LORA, name='first')[0]


def test_a_rank_above_full_rank_is_a_warning():
  told = r'^Rank 7 is more than the full rank of down \(6\), up \(6\)\.$'
  with pytest.warns(UserWarning, match=told) as warned:
    _, report = peftlab.attach(Two(), LoRA(rank=7))
  assert len(warned) == 1
  assert report.trainable == 2 * 7 * (6 + 10)


def test_numbers_of_numpy_and_jax_are_taken_for_what_they_hold():
  adapter = LoRA(rank=np.int64(3), alpha=jnp.float32(6), rslora=np.bool_(False))
  assert adapter == LoRA(rank=3, alpha=6.0)
  assert [type(getattr(adapter, n)) for n in ('rank', 'alpha', 'rslora')] == [int, float, bool]


def test_a_type_without_embeddings_is_refused_on_any_lookup():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class NoLookup(LowRank):
    embeddings = False

  model = nnx.Module()
  model.table = layers.Embedding(7, 4, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r'^NoLookup does not work on the embedding table'):
    peftlab.attach(model, NoLookup(), where='table')


def test_the_model_given_is_untouched_and_its_arrays_are_shared():
  base = Two()
  before = peftlab.split(base)
  model, _ = peftlab.attach(base, LORA)
  assert peftlab.split(base).graph == before.graph
  assert type(base.up) is nnx.Linear
  assert isinstance(model.up, nnx.Linear)
  assert peftlab.assert_base_shared(base, model) == '4/4'
  model.up.adapters[0].b[...] += 1
  assert float(jnp.max(jnp.abs(model(jnp.ones((1, 6))) - base(jnp.ones((1, 6)))))) > 1e-3


def test_adapted_layers_keep_their_paths():
  parts = peftlab.split(peftlab.attach(testing.StackModel(), LORA)[0])
  assert jax.tree.map(jnp.shape, parts.adapter) == {
    'layers': {
      'up': {'adapters': {0: {'a': (2, 16, 2), 'b': (2, 2, 24), 'scale': (2,)}}},
      'down': {'adapters': {0: {'a': (2, 24, 2), 'b': (2, 2, 16), 'scale': (2,)}}},
    }
  }
  assert parts.base.keys() == {'layers'}
  assert parts.state == {}


def test_detach_is_the_inverse_of_attach():
  base = Two()
  model, _ = peftlab.attach(base, LORA, name='first')
  model, _ = peftlab.attach(model, LoRA(rank=3), name='second', where='up')
  for detached in (peftlab.detach(model), peftlab.detach(peftlab.detach(model, 'second'), 'first')):
    assert peftlab.split(detached).graph == peftlab.split(base).graph
    assert peftlab.assert_base_shared(base, detached) == '4/4'
  assert _attach.names(model) == ('first', 'second'), 'detach touched the model given'
  assert type(peftlab.detach(base).up) is nnx.Linear


def test_activate_switches_by_name():
  model, _ = peftlab.attach(once(), LORA, name='second', rngs=1)
  model = peftlab.merge(cases.randomized(peftlab.split(model)))
  x = jnp.ones((2, 6))
  both = model(x)
  peftlab.activate(model, 'second')
  second = model(x)
  peftlab.activate(model)
  np.testing.assert_array_equal(model(x), Two()(x))
  peftlab.activate(model, 'second', 'first')
  np.testing.assert_array_equal(model(x), both)
  assert float(jnp.max(jnp.abs(second - both))) > 1e-3
  alone = peftlab.detach(model, 'first')
  np.testing.assert_allclose(alone(x), second, rtol=1e-6)


def test_disabled_restores_each_adapters_own_state():
  model, _ = peftlab.attach(once(), LORA, name='second')
  peftlab.activate(model, 'second')
  with peftlab.disabled(model) as same:
    assert same is model
    assert not any(a.active for a in model.up.adapters)
  assert [a.active for a in model.up.adapters] == [False, True]


def test_every_form_of_a_seed_gives_the_same_values():
  values = [
    peftlab.attach(Two(), LORA, rngs=rngs)[0].up.adapters[0].a[...]
    for rngs in (7, jax.random.key(7))
  ]
  np.testing.assert_array_equal(*values)
  rngs = nnx.Rngs(7)
  first, second = (
    peftlab.attach(Two(), LORA, rngs=rngs)[0].up.adapters[0].a[...] for _ in range(2)
  )
  assert not np.array_equal(first, second), 'rngs were drawn from once'


def test_a_layer_draws_the_same_dropout_in_a_stack_and_in_a_list():
  adapter = LoRA(rank=2, dropout=0.5)
  stacked, _ = peftlab.attach(testing.StackModel(), adapter)
  listed, _ = peftlab.attach(testing.ListModel(), adapter)
  keys = jax.random.key_data(stacked.layers.up.adapters[0].rng_key[...])
  for index, layer in enumerate(listed.layers):
    own = jax.random.key_data(layer.up.adapters[0].rng_key[...])
    np.testing.assert_array_equal(own, keys[index])
  assert not np.array_equal(keys[0], keys[1])


def test_a_model_of_shapes_gets_shapes_and_their_shardings():
  mesh = testing.meshes()['fsdp4_tensor2']

  def shape(s):
    return lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, s))

  parts = peftlab.split(testing.StackModel())
  spec = shape(P(None, 'fsdp', 'tensor'))
  kernels = {
    p: spec(a) if a.ndim == 3 else shape(P())(a) for p, a in _parts.flat(parts.base).items()
  }
  model = peftlab.merge(parts.replace(base=_parts.nest(kernels)))
  adapted, report = peftlab.attach(model, LoRA(rank=2, dropout=0.1))
  found = peftlab.split(adapted)
  for leaf in jax.tree.leaves((found.adapter, found.state)):
    assert isinstance(leaf, jax.ShapeDtypeStruct), leaf
  assert found.adapter['layers']['up']['adapters'][0]['a'].sharding.spec == P(
    None, ('fsdp', 'tensor'), None
  )
  real, _ = peftlab.attach(testing.StackModel(), LoRA(rank=2, dropout=0.1))
  assert found.graph == peftlab.split(real).graph
  assert report.nbytes == peftlab.nbytes(peftlab.split(real).adapter)


def test_first_values_lie_where_their_kernel_lies():
  """From the kernel's spec, on (4, 2): A over in, B over out, each spread over both axes."""
  mesh = testing.meshes()['fsdp4_tensor2']
  placed, _ = _specs.place(testing.StackModel(), mesh)
  model, report = peftlab.attach(placed, LoRA(rank=2))
  specs = {
    f'{layer}.{slot}': getattr(getattr(model.layers, layer).adapters[0], slot)[...].sharding.spec
    for layer in ('up', 'down')
    for slot in ('a', 'b', 'scale')
  }
  assert specs == {
    'up.a': P(None, ('fsdp', 'tensor'), None),
    'up.b': P(None, None, ('tensor', 'fsdp')),
    'up.scale': P(None),
    'down.a': P(None, ('tensor', 'fsdp'), None),
    'down.b': P(None, None, ('fsdp', 'tensor')),
    'down.scale': P(None),
  }
  assert report.dropped == ()
  assert report.rows[1].spec == "P(None, 'fsdp', 'tensor')"


def test_under_tensor_parallelism_alone_each_factor_has_its_own_side():
  mesh = jax.make_mesh((8,), ('tensor',), axis_types=(jax.sharding.AxisType.Auto,))
  placed, _ = _specs.place(testing.StackModel(), mesh)
  model, _ = peftlab.attach(placed, LoRA(rank=2))
  up, down = model.layers.up.adapters[0], model.layers.down.adapters[0]
  assert [v[...].sharding.spec for v in (up.a, up.b, down.a, down.b)] == [
    P(None, None, None),
    P(None, None, 'tensor'),
    P(None, 'tensor', None),
    P(None, None, None),
  ]
  parts = cases.randomized(peftlab.split(model))
  single = cases.randomized(peftlab.split(peftlab.attach(testing.StackModel(), LoRA(rank=2))[0]))
  x = cases.stack_input()
  chex.assert_trees_all_close(
    np.asarray(cases.forward(parts, x)), np.asarray(cases.forward(single, x)), rtol=1e-4, atol=1e-5
  )


def test_dropped_axes_of_the_adapter_are_reported():
  mesh = testing.meshes()['fsdp4_tensor2']
  placed, _ = _specs.place(testing.StackModel((16, 22)), mesh)
  _, report = peftlab.attach(placed, LoRA(rank=2))
  assert {str(d).split(';')[0] for d in report.dropped} == {
    "layers.up.adapters.default.b: axis 'fsdp' (4) does not divide dimension 2 (22)",
    "layers.down.adapters.default.a: axis 'fsdp' (4) does not divide dimension 1 (22)",
  }

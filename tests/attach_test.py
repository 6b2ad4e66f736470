"""Attach, detach, activate: what they give, what they leave alone, every bad input in one table."""

import dataclasses

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import peftlab
from peftlab import Slot, _attach, _parts, _specs, testing
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


def _type(**slots):
  """An adapter whose slots are these; it reads those it knows of LowRank's."""

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Odd(LowRank):
    def slots(self):
      return {k: v for k, v in (super().slots() | slots).items() if v is not None}

  return Odd(rank=2)


def _shifted():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class WrongShape(LowRank):
    def apply(self, x, base, p):
      return super().apply(x, base, p)[..., :3]

  return WrongShape(rank=2)


class OwnAdapters(nnx.Linear):
  adapters = ()


def _with_own_adapters():
  model = nnx.Module()
  model.layer = OwnAdapters(6, 10, rngs=nnx.Rngs(0))
  return model


def _once():
  return peftlab.attach(Two(), LORA, name='first')[0]


def _wide(key, shape, dtype):
  del key
  return jnp.zeros((*shape, 1), dtype)


# what -> (call, message)
BAD = {
  'no adapter': (
    lambda: peftlab.attach(Two(), 'lora'),
    "^attach takes an Adapter, given str: 'lora'",
  ),
  'an adapter type': (
    lambda: peftlab.attach(Two(), LoRA),
    '^attach takes an instance, given the type: write LoRA',
  ),
  'no model': (lambda: peftlab.attach({}, LORA), '^split takes an nnx.Module, given dict'),
  'parts for a model': (
    lambda: peftlab.attach(peftlab.split(Two()), LORA),
    '^split takes an nnx.Module, given Parts',
  ),
  'nothing to adapt': (
    lambda: peftlab.attach(nnx.Embed(4, 4, rngs=nnx.Rngs(0)), LORA),
    "^where='all-linear' matches no layer. Layers: Embed.",
  ),
  'an empty name': (lambda: peftlab.attach(Two(), LORA, name=''), "^The adapter name '' must"),
  'a dotted name': (
    lambda: peftlab.attach(Two(), LORA, name='a.b'),
    "^The adapter name 'a.b' must",
  ),
  'a slash': (lambda: peftlab.attach(Two(), LORA, name='a/b'), "^The adapter name 'a/b' must"),
  'no string': (lambda: peftlab.attach(Two(), LORA, name=3), '^The adapter name 3 must be'),
  'a taken name': (
    lambda: peftlab.attach(_once(), LORA, name='first'),
    "already has an adapter named 'first'; detach it first",
  ),
  'rngs of a float': (lambda: peftlab.attach(Two(), LORA, rngs=0.5), '^rngs must be a seed, a jax'),
  'rngs of a bool': (lambda: peftlab.attach(Two(), LORA, rngs=True), '^rngs must be a seed, a jax'),
  'rngs of None': (lambda: peftlab.attach(Two(), LORA, rngs=None), '^rngs must be a seed, a jax'),
  'rngs of an old key': (
    lambda: peftlab.attach(Two(), LORA, rngs=jnp.zeros((2,), jnp.uint32)),
    '^rngs must be a seed',
  ),
  'rank 0': (lambda: LoRA(rank=0), r'^LoRA rank is 0; it must be at least 1'),
  'rank -1': (lambda: peftlab.attach(Two(), LowRank(rank=-1)), r'^LowRank.rank is -1; it must be'),
  'rank 2.5': (
    lambda: peftlab.attach(Two(), LoRA(rank=2.5)),
    r'^LoRA.rank is 2.5; it must be an int',
  ),
  'dropout 1': (lambda: LoRA(dropout=1.0), '^LoRA dropout is 1.0; it must be at least 0 and below'),
  'init': (lambda: LoRA(init='he_unifrom'), "^No LoRA init 'he_unifrom'"),
  'no slots': (
    lambda: peftlab.attach(Two(), _type(a=None, b=None, scale=None)),
    r'Odd.slots\(\) is empty',
  ),
  'a slot that is none': (
    lambda: peftlab.attach(Two(), _type(a='in rank')),
    'must be a Slot, given str',
  ),
  'a missing slot': (
    lambda: peftlab.attach(Two(), _type(scale=None)),
    "No slot 'scale'. Slots: a, b",
  ),
  'an unread slot': (
    lambda: peftlab.attach(Two(), _type(c=Slot(dims='rank'))),
    'slots that apply never reads: c',
  ),
  'an unknown dimension': (
    lambda: peftlab.attach(Two(), _type(a=Slot(dims='in rnak'))),
    "'rnak' .*did you mean 'rank'",
  ),
  'a slot named items': (
    lambda: peftlab.attach(Two(), _type(items=Slot(dims=''))),
    "cannot name a slot 'items'",
  ),
  'a slot named read': (
    lambda: peftlab.attach(Two(), _type(read=Slot(dims=''))),
    "cannot name a slot 'read'",
  ),
  'a slot named train': (
    lambda: peftlab.attach(Two(), _type(train=Slot(dims=''))),
    "cannot name a slot 'train'",
  ),
  'a slot named active': (
    lambda: peftlab.attach(Two(), _type(active=Slot(dims=''))),
    "cannot name a slot 'active'",
  ),
  'a slot of two words': (
    lambda: peftlab.attach(Two(), _type(**{'a b': Slot(dims='')})),
    "cannot name a slot 'a b'",
  ),
  'init of another shape': (
    lambda: peftlab.attach(Two(), _type(a=Slot(dims='in rank', init=_wide))),
    r"Slot 'a' starts with shape \(\d+, 2, 1\); its dims say \(\d+, 2\)\.",
  ),
  'apply of another shape': (
    lambda: peftlab.attach(Two(), _shifted()),
    r'apply gave shape \(3, 3\)',
  ),
  'a layer with adapters of its own': (
    lambda: peftlab.attach(_with_own_adapters(), LORA),
    'has an attribute `adapters` of its own',
  ),
  'detach another': (
    lambda: peftlab.detach(_once(), 'frist'),
    "no adapter 'frist'; did you mean 'first'",
  ),
  'detach from a base': (lambda: peftlab.detach(Two(), 'a'), "no adapter 'a'. Adapters: none"),
  'activate another': (
    lambda: peftlab.activate(_once(), 'first', 'x'),
    "The model has no adapter 'x'. Adapters: first",
  ),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_refused_in_one_sentence(case):
  call, message = BAD[case]
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert str(error.value)[-1] in '.?'


def test_a_rank_above_full_rank_is_a_warning():
  with pytest.warns(UserWarning, match=r'^up: rank 7 is more than full rank, 6\.$'):
    _, report = peftlab.attach(Two(), LoRA(rank=7), where='up')
  assert report.trainable == 7 * (6 + 10)


def test_a_type_without_embeddings_is_refused_on_any_lookup():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class NoLookup(LowRank):
    embeddings = False

  model = nnx.Module()
  model.table = layers.Embedding(7, 4, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r'^NoLookup does not work on the embedding table'):
    peftlab.attach(model, NoLookup(), where='table')


def test_a_failing_attach_leaves_nothing_behind():
  model = _once()
  before = peftlab.split(model)
  for adapter, where in ((LowRank(rank=0), 'up'), (LORA, 'upp'), (_type(c=Slot(dims='')), 'up')):
    with pytest.raises(ValueError, match=r'rank|upp|never reads'):
      peftlab.attach(model, adapter, where=where, name='second')
  after = peftlab.split(model)
  assert after.graph == before.graph
  assert _attach.names(model) == ('first',)


def test_a_failing_activate_switches_nothing():
  model, _ = peftlab.attach(_once(), LORA, name='second')
  peftlab.activate(model, 'first')
  with pytest.raises(ValueError, match="no adapter 'x'"):
    peftlab.activate(model, 'second', 'x')
  assert [a.active for a in model.up.adapters] == [True, False]


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
  model, _ = peftlab.attach(_once(), LORA, name='second', rngs=1)
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
  model, _ = peftlab.attach(_once(), LORA, name='second')
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
    "layers.up.adapters.default.b: axis 'fsdp' (4) does not divide dimension 1 (22)",
    "layers.down.adapters.default.a: axis 'fsdp' (4) does not divide dimension 0 (22)",
  }

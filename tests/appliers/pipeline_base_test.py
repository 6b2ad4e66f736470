"""The base under a pipeline: laid out once, never moved, never copied, on disk as ever."""

import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _stack
from peftlab.appliers import Pipeline, Scan
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from tests.appliers import pipelines

pytestmark = pytest.mark.usefixtures('quick_compiles')

X = pipelines.X
CIRCULAR = Pipeline(microbatches=4, repeats=2)
COLLECTIVES = r'= ((?:\(?\w+\[[^=]*?)) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\('


@pytest.fixture(scope='module')
def mesh():
  return pipelines.mesh(4)


@pytest.fixture(scope='module')
def circular(mesh):
  """8 layers on 4 stages, twice around, with random factors."""
  return pipelines.laid_out(pipelines.adapted(8), CIRCULAR, mesh)


def gradient(parts, x):
  def loss(adapter):
    return jnp.mean(jnp.square(peftlab.merge(parts.replace(adapter=adapter))(x)))

  return jax.grad(loss)(parts.adapter)


def test_stage_order_is_a_permutation_made_once(mesh, circular):
  before = peftlab.split(pipelines.model(8).layers)
  layers = peftlab.merge(circular).layers
  assert layers.layer_order == (0, 4, 1, 5, 2, 6, 3, 7)
  order = np.asarray(layers.layer_order)
  for path, array in _parts.flat(before.base).items():
    held = _parts.flat(circular.base)['layers', *path]
    np.testing.assert_array_equal(held, np.asarray(array)[order])
    assert held.sharding.spec[0] == 'stage'
    assert held.addressable_shards[0].data.shape[0] == 2
  assert CIRCULAR.lay_out(layers, mesh) is layers
  back = Scan().lay_out(layers)
  assert back.layer_order is None
  chex.assert_trees_all_equal(
    {p: np.asarray(a) for p, a in _parts.flat(peftlab.split(back).base).items()},
    {('adapters' in p or p): np.asarray(a) for p, a in _parts.flat(before.base).items()},
  )


def test_layer_order_needs_no_new_array(mesh):
  layers = pipelines.model(8).layers
  assert Pipeline(microbatches=4).lay_out(layers, mesh) is layers


def test_shapes_are_laid_out_too(mesh):
  layers = nnx.eval_shape(lambda: pipelines.model(6).layers)
  laid = Pipeline(rest='pad').lay_out(layers, mesh)
  assert laid.up.kernel.shape == (8, 16, 24)
  assert laid.layer_order == (0, 1, 2, 3, 4, 5, -1, -1)


def test_an_array_that_is_donated_is_gone(mesh):
  layers = pipelines.model(8).layers
  CIRCULAR.lay_out(layers, mesh, donate=True)
  assert layers.up.kernel[...].is_deleted()


def test_the_base_is_the_same_objects_through_it_all(mesh, circular, tmp_path):
  base = peftlab.detach(peftlab.merge(circular))
  model, _ = peftlab.attach(base, LoRA(rank=2))
  with jax.set_mesh(mesh):
    moved = jax.tree.map(jnp.subtract, circular.adapter, jax.jit(gradient)(circular, X))
  trained = peftlab.merge(circular.replace(adapter=moved))
  peftlab.save_adapter(trained, tmp_path / 'adapter')
  loaded = peftlab.load_adapter(base, tmp_path / 'adapter')
  for after in (model, trained, loaded, peftlab.detach(loaded)):
    assert peftlab.assert_base_shared(base, after) == '4/4'
  chex.assert_trees_all_equal(peftlab.split(loaded).adapter, moved)


@pytest.mark.parametrize('rest', ('pad', 'last'))
def test_adapters_move_between_scan_and_pipeline_by_their_files(mesh, tmp_path, rest):
  pipeline = Pipeline(microbatches=2, rest=rest)
  scanned, base = pipelines.adapted(6), pipelines.model(6)
  staged = peftlab.merge(pipelines.laid_out(peftlab.split(base), pipeline, mesh))
  peftlab.save_adapter(peftlab.merge(scanned), tmp_path / 'scan')
  there = peftlab.load_adapter(staged, tmp_path / 'scan')
  kernel = peftlab.split(there).adapter['layers']['up']['adapters'][0]['a']
  assert (kernel.shape, kernel.sharding.spec[0]) == ((8, 16, 2), 'stage')
  peftlab.save_adapter(there, tmp_path / 'pipeline')
  names = ('adapter_model.safetensors', 'peftlab.json')
  for name in names:
    assert (tmp_path / 'scan' / name).read_bytes() == (tmp_path / 'pipeline' / name).read_bytes()
  back = peftlab.load_adapter(base, tmp_path / 'pipeline')
  chex.assert_trees_all_equal(peftlab.split(back).adapter, scanned.adapter)


def test_a_seed_gives_a_layer_the_same_first_values_in_any_order(mesh):
  first = pipelines.laid_out(peftlab.split(pipelines.model(8)), CIRCULAR, mesh)
  staged = peftlab.split(peftlab.attach(peftlab.merge(first), LoRA(rank=2), rngs=5)[0])
  plain = peftlab.split(peftlab.attach(pipelines.model(8), LoRA(rank=2), rngs=5)[0])
  found = pipelines.per_layer(staged, _parts.flat(staged.adapter))
  for path, array in _parts.flat(plain.adapter).items():
    np.testing.assert_array_equal(found[path], array)


def collectives(text):
  """[(kind, shapes)] of a compiled program."""
  found = re.findall(COLLECTIVES, text)
  return [(kind, re.findall(r'\[([\d,]*)\]', shapes)) for shapes, kind in found]


def test_no_collective_moves_the_base(circular, mesh):
  """Forward and backward: only activations and what belongs to adapters travel."""
  with jax.set_mesh(mesh):
    text = jax.jit(gradient).lower(circular, jax.device_put(X, pipelines.on_rows(mesh))).compile()
  found = collectives(text.as_text())
  assert {kind for kind, _ in found} >= {'collective-permute'}
  for kind, shapes in found:
    for shape in shapes:
      sizes = [int(n) for n in shape.split(',') if n]
      assert sizes[-2:] not in ([16, 24], [24, 16]), f'{kind} of {shape}'


def equations(jaxpr):
  """Every equation of a jaxpr and of the jaxprs in it."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from equations(inner)


@pytest.mark.parametrize('remat', ('none', 'full', 'outputs'))
@pytest.mark.parametrize('repeats', (1, 2))
def test_it_takes_the_ticks_it_says_and_keeps_no_copy_of_the_base(mesh, repeats, remat):
  pipeline = Pipeline(microbatches=5, repeats=repeats, remat=remat)
  parts = pipelines.adapted(8)
  model = peftlab.merge(parts)
  model.layers, model.applier = pipeline.lay_out(model.layers, mesh), pipeline
  x = jax.ShapeDtypeStruct((10, 16), jnp.float32)
  with jax.set_mesh(mesh):
    jaxpr = jax.make_jaxpr(gradient)(peftlab.split(model), x)
  found = list(equations(jaxpr.jaxpr))
  lengths = [e.params['length'] for e in found if e.primitive.name == 'scan']
  ticks = {1: 5 + 4 - 1, 2: 5 + 5 + 4 - 1}[repeats]
  assert lengths.count(ticks) == 2, 'one forward, one backward'
  assert set(lengths) == {ticks, pipeline.schedule(8, mesh).depth}
  kept = [v.aval.shape for e in found for v in e.outvars if hasattr(v.aval, 'shape')]
  copies = [s for s in kept if s[-2:] in ((16, 24), (24, 16)) and len(s) > 2 and s[0] > 2]
  assert not copies, f'copies of the base: {copies}'


def test_the_order_is_that_of_the_arrays():
  layers = pipelines.model(4).layers
  setattr(layers, _stack.LAYER_ORDER, (0, 1, 2))
  with pytest.raises(ValueError, match='laid out as 3 places has arrays with 4; lay it out again'):
    Scan().run(layers, X, lambda layer, x: layer(x))


def test_an_array_already_on_a_mesh_stays_there(mesh):
  made = pipelines.laid_out(peftlab.split(pipelines.model(8)), Pipeline(), mesh)
  again = CIRCULAR.lay_out(peftlab.merge(made).layers, mesh)
  assert again.up.kernel[...].sharding.spec == P('stage', None, None)
  cases.assert_equal(
    np.asarray(again.up.kernel[...])[[0, 2, 4, 6, 1, 3, 5, 7]],
    np.asarray(pipelines.model(8).layers.up.kernel[...]),
    'kernel',
  )

"""The shapes that are planned are those of the arrays that a run makes, and lie where they do."""

import dataclasses

from flax import nnx
import jax
import pytest

import peftlab
from peftlab import _specs
from peftlab.plan import base as plan_base
from peftlab.plan import planning, shapes
from peftlab.plugins.lora import LoRA
from peftlab.train import config, opt_state
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')

MESHES = {'one device': {}, 'fsdp 4 x tensor 2': {'fsdp': 4, 'tensor': 2}}


def abstract(mesh):
  place = jax.devices()[0] if mesh is None else mesh
  model = nnx.eval_shape(lambda: tiny.Decoder(tiny.DECODER, rngs=nnx.Rngs(0)))
  return shapes.placed(model, place), place


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.parametrize('mesh', MESHES.values(), ids=MESHES)
@pytest.mark.parametrize('optimizer', ('adamw', 'adafactor'))
def test_shapes_are_those_of_a_run(mesh, optimizer):
  mesh = _specs.make_mesh(mesh) if mesh else None
  experiment = tiny.experiment(optimizer=optimizer)
  (outline, _), place = abstract(mesh)
  found = shapes.shapes(experiment, outline, place)
  model = tiny.base_model() if mesh is None else _specs.place(tiny.base_model(), mesh)[0]
  model, _ = peftlab.attach(model, experiment.adapter, rngs=experiment.seed, name=experiment.name)
  parts = opt_state.training_parts(model)
  state = opt_state.init_opt_state(parts, found.options, learning_rate=0.1)
  assert found.parts.graph == parts.graph
  assert_same(found.parts, parts)
  assert_same(found.state, state)


def test_a_batch_is_that_of_the_data():
  experiment = tiny.experiment()
  found = shapes.batch_shapes(experiment, jax.devices()[0])
  batch = tiny.text().rows.batch([0, 1])
  assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
    name: (a.shape, a.dtype) for name, a in batch.items()
  }


def test_bytes_of_one_device_are_those_of_its_shards():
  mesh = _specs.make_mesh({'fsdp': 4, 'tensor': 2})
  (outline, dropped), place = abstract(mesh)
  experiment = dataclasses.replace(tiny.experiment(), data=config.DataConfig(length=8, batch=4))
  found = planning.held(shapes.shapes(experiment, outline, place))
  model = _specs.place(tiny.base_model(), mesh)[0]
  first = mesh.devices.flat[0]
  leaves = jax.tree.leaves(peftlab.split(model).base)
  held = [s.data.nbytes for a in leaves for s in a.addressable_shards if s.device == first]
  assert found['base'] == sum(held)
  assert found['batch'] == 5 * 8 * 4  # one of 4 rows
  assert dropped == _specs.shardings(model, mesh)[1]


def test_llama3_8b_is_outlined_from_its_name():
  base = config.BaseConfig(source='llama3-8b', dtype='bfloat16')
  model = plan_base.outline(base)
  parts = peftlab.split(model)
  assert all(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(parts.base))
  # 8.03e9 weights of 2 bytes, as the model card counts them.
  assert peftlab.nbytes(parts.base) == pytest.approx(2 * 8.03e9, rel=1e-3)


def test_a_folder_needs_a_config_and_no_weights(tmp_path):
  (tmp_path / 'config.json').write_text(
    '{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,'
    ' "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,'
    ' "rms_norm_eps": 1e-5}'
  )
  model = plan_base.outline(config.BaseConfig(source=str(tmp_path)))
  assert model.embed.table.shape == (32, 16)
  (tmp_path / 'config.json').write_text('{"model_type": "lama"}')
  with pytest.raises(ValueError, match="model_type 'lama'; did you mean 'llama'"):
    plan_base.outline(config.BaseConfig(source=str(tmp_path)))


def test_an_unknown_base_is_refused_with_the_nearest():
  with pytest.raises(ValueError, match="No base 'llama3-8'; did you mean 'llama3-8b'"):
    plan_base.outline(config.BaseConfig(source='llama3-8'))


def test_a_quantized_base_is_planned_as_codes():
  place = jax.devices()[0]
  (model, _), _ = abstract(None)
  experiment = config.Experiment(adapter=LoRA(rank=2), data=config.DataConfig(length=8, batch=2))
  quantized = peftlab.quant.quantize(model, 'int8', tile=0)[0]
  placed, _ = shapes.placed(quantized, place)
  found = planning.held(shapes.shapes(experiment, placed, place))
  plain = planning.held(shapes.shapes(experiment, model, place))
  assert found['base'] < plain['base']
  assert found['adapter'] == plain['adapter']

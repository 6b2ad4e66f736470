"""A decoder under a pipeline: trains, generates and is configured as under scan."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs
from peftlab.appliers import Pipeline, Scan
from peftlab.cli import _flags
from peftlab.models.config import DecoderConfig
from peftlab.models.decoder import Decoder
from peftlab.models.load import load_model
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from peftlab.train import devices, opt_state, step
from peftlab.train.config import BaseConfig, DataConfig, Experiment, MeshConfig
from tests.appliers import pipelines

pytestmark = pytest.mark.usefixtures('quick_compiles')

CONFIG = DecoderConfig(
  family='llama',
  vocab=32,
  layers=3,
  embed=16,
  mlp=24,
  q_heads=4,
  kv_heads=2,
  head_dim=4,
  max_length=16,
)
ROWS, LENGTH = 4, 8
TOKENS = jax.random.randint(jax.random.key(0), (ROWS, LENGTH), 0, CONFIG.vocab)
BATCH = {
  'tokens': TOKENS,
  'targets': jnp.roll(TOKENS, -1, axis=1),
  'loss_mask': jnp.ones((ROWS, LENGTH)),
  'positions': jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3]] * ROWS),
  'segment_ids': jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2]] * 3 + [[1] * LENGTH]),
}


def decoder(applier, mesh=None):
  made = Decoder(CONFIG, rngs=nnx.Rngs(0), applier=applier)
  made = made if mesh is None else _specs.place(made, mesh)[0]
  made.lay_out(mesh)
  return made


@functools.cache
def staged(rest):
  return decoder(Pipeline(microbatches=2, rest=rest, remat='outputs'), pipelines.mesh(2, 1, 2))


def trained(model, mesh, folder):
  """(losses of 3 steps, the adapter after them as it is on disk)."""
  model, _ = peftlab.attach(model, LoRA(rank=2, dropout=0.0))
  parts = opt_state.training_parts(model)
  options = step.StepOptions(steps=3)
  state = opt_state.init_opt_state(parts, options, learning_rate=0.01)
  update, losses, adapter = step.step_for(parts, state, options), [], parts.adapter
  batch = devices.place_batch(BATCH, mesh)
  with _specs.using(mesh):
    for _ in range(3):
      adapter, state, metrics = update(adapter, state, parts.base, batch)
      losses.append(float(metrics['loss']))
  assert update.traces == 1
  peftlab.save_adapter(peftlab.merge(parts.replace(adapter=adapter)), folder)
  loaded = peftlab.load_adapter(decoder(Scan()), folder)
  return losses, _parts.flat(peftlab.split(loaded).adapter)


def test_a_decoder_trains_as_under_scan(tmp_path):
  """With a layer outside of the stages; losses and trained factors agree."""
  losses, adapter = trained(decoder(Scan()), None, tmp_path / 'scan')
  mesh = pipelines.mesh(2, 1, 2)
  found, moved = trained(staged('last'), mesh, tmp_path / 'pipeline')
  np.testing.assert_allclose(found, losses, rtol=1e-5)
  assert losses[2] < losses[0]
  for path, array in adapter.items():
    # Adam's first steps follow the signs of gradients, those of rounding errors included.
    np.testing.assert_allclose(moved[path], array, atol=2e-3, err_msg=str(path))


def test_a_decoder_generates_with_caches():
  """The cache of each microbatch's rows, in layer order; of 3 rows one microbatch is made."""
  mesh, model = pipelines.mesh(2, 1, 2), staged('pad')
  expected = decoder(Scan())(TOKENS[:3])
  with jax.set_mesh(mesh):
    cached = model.init_cache(3, LENGTH)
    assert cached.applier.microbatches == 1
    assert cached.layers.attn.cached_k.shape[:2] == (4, 3)
    first = cached(TOKENS[:3, :6], positions=jnp.arange(6)[None])
    rest = cached(TOKENS[:3, 6:], positions=jnp.arange(6, 8)[None])
  found = jnp.concatenate([first, rest], axis=1)
  cases.assert_close(found, expected, 'logits')


def test_the_flags_make_the_applier():
  flags = ('applier=pipeline', 'microbatches=4', 'repeats=2', 'rest=last', 'remat=full')
  argv = ['--config=glassllm_lora', *(f'--config.base.{flag}' for flag in flags)]
  experiment, _ = _flags.parse([*argv, '--config.mesh.stage=4'], lambda values: None)
  expected = Pipeline(microbatches=4, repeats=2, rest='last', remat='full')
  assert experiment.base.make_applier() == expected
  assert experiment.mesh.stage == 4
  assert BaseConfig().make_applier() == Scan(remat='outputs')


def test_rows_that_microbatches_do_not_divide_are_refused_before_a_weight_is_read():
  experiment = Experiment(
    base=BaseConfig(applier='pipeline', microbatches=3),
    mesh=MeshConfig(stage=2),
    data=DataConfig(batch=4),
  )
  mesh = devices.make_mesh(experiment.mesh)
  with pytest.raises(ValueError, match=r'base.microbatches is 3; it must divide the 4 rows'):
    devices.check_batch(experiment, mesh)
  changed = dataclasses.replace(experiment.base, microbatches=2)
  devices.check_batch(dataclasses.replace(experiment, base=changed), mesh)


def test_a_model_loads_into_stage_order_and_without_a_mesh_not_at_all():
  mesh = pipelines.mesh(2)
  pipeline = Pipeline(microbatches=2, repeats=2)
  model = load_model('package:glassllm/en', mesh, applier=pipeline)
  plain = load_model('package:glassllm/en')
  assert model.layers.layer_order == (0, 2, 1, 3)
  kernel = model.layers.attn.q.kernel[...]
  assert kernel.sharding.spec[0] == 'stage'
  np.testing.assert_array_equal(kernel, np.asarray(plain.layers.attn.q.kernel[...])[[0, 2, 1, 3]])
  with pytest.raises(ValueError, match="needs a mesh with an axis 'stage'"):
    load_model('package:glassllm/en', applier='pipeline')

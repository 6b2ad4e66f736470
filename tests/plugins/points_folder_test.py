"""Folders of adapters on points, and of activated LoRA: PEFT's and ours, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import peftlab
from peftlab import _parts
from tests.plugins.points_test import (
  ZOO,
  arrays,
  base,
  close,
  every_model,
  invocation_tokens,
  prefixed,
  tokens,
)

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_ranks')


@pytest.mark.parametrize(
  'name',
  (
    'prompt/random',
    'prefix/plain',
    'prefix/projection',
    'p_tuning/mlp',
    'p_tuning/lstm',
    'alora/list',
  ),
)
def test_a_folder_of_peft_is_read(name):
  kind, label = name.split('/')
  model = peftlab.load_adapter(base(), ZOO / name)
  given = invocation_tokens() if kind == 'alora' else tokens()
  close(model(given), arrays(f'{kind}/logits.npz')[label][:, -12:])


@pytest.mark.parametrize('name', ('prompt', 'prefix', 'alora'))
def test_a_folder_is_one_of_peft(name, tmp_path):
  label = {'prompt': 'random', 'prefix': 'plain', 'alora': 'list'}[name]
  peftlab.save_adapter(every_model()[name], tmp_path / 'a')
  theirs, ours = ZOO / name / label, tmp_path / 'a'
  expected = load_file(theirs / 'adapter_model.safetensors')
  written = load_file(ours / 'adapter_model.safetensors')
  assert written.keys() == expected.keys()
  for key, array in expected.items():
    np.testing.assert_array_equal(written[key], array, err_msg=key)
  told = json.loads((ours / 'adapter_config.json').read_text())
  config = json.loads((theirs / 'adapter_config.json').read_text())
  for key in ('peft_type', 'num_virtual_tokens', 'token_dim', 'alora_invocation_tokens'):
    assert told.get(key) == config.get(key), key
  if name == 'prefix':  # PEFT shapes keys and values by these
    for key in ('num_layers', 'num_attention_heads'):
      assert told[key] == config[key], key


def test_a_projected_prefix_comes_back_whole(tmp_path):
  model = prefixed('projection')[0]
  peftlab.save_adapter(model, tmp_path / 'a')
  again = peftlab.load_adapter(base(), tmp_path / 'a')
  held = _parts.flat(peftlab.split(again).adapter)
  for path, array in _parts.flat(peftlab.split(model).adapter).items():
    np.testing.assert_array_equal(held[path], array, err_msg=_parts.path_name(path))


def cut(config, tensors):
  return config, {k: a[:, :-1] for k, a in tensors.items()}


def fewer(config, tensors):
  return config | {'num_virtual_tokens': 2}, tensors


def encoder(config, tensors):
  return config | {'num_transformer_submodules': 2}, tensors


@pytest.mark.parametrize(
  ('change', 'message'),
  ((cut, '16 features'), (fewer, '2 virtual tokens'), (encoder, 'num_transformer_submodules')),
)
def test_a_folder_that_does_not_fit_is_refused(change, message, tmp_path):
  from safetensors.numpy import save_file

  source = ZOO / 'prompt' / 'random'
  config = json.loads((source / 'adapter_config.json').read_text())
  config, tensors = change(config, load_file(source / 'adapter_model.safetensors'))
  (tmp_path / 'adapter_config.json').write_text(json.dumps(config))
  save_file(
    {k: np.ascontiguousarray(a) for k, a in tensors.items()},
    tmp_path / 'adapter_model.safetensors',
  )
  with pytest.raises(ValueError, match=message):
    peftlab.load_adapter(base(), tmp_path)

"""PEFT adapter folders: PEFT's own read and rewritten, and everything that can be wrong."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from peftlab.formats import hf_peft, peft_config, peft_values, peft_writing
from peftlab.formats.hf_peft import read_peft_folder, write_peft_folder
from peftlab.formats.hf_weights import HfWeights
from peftlab.formats.safetensors_file import SafetensorsFile, write_safetensors

GOLDENS = pathlib.Path(__file__).parents[1] / 'goldens' / 'peft_lora'
NAMES = ('plain', 'patterns', 'embedding')
Q0 = 'base_model.model.model.layers.0.self_attn.q_proj'


def read(folder):
  config, tensors = read_peft_folder(folder)
  return peft_values.read(config, tensors, subject='It')


@pytest.mark.parametrize('name', NAMES)
def test_the_delta_is_the_one_peft_computes(name):
  adapters, values = read(GOLDENS / name)
  path = 'model.layers.1.self_attn.q_proj'
  a, b = (values[path][slot].astype(np.float32) for slot in 'ab')
  expected = np.load(GOLDENS / 'logits.npz')[f'delta_{name}']
  assert values[path]['scale'] == np.float32(adapters[path].scale)
  np.testing.assert_allclose(values[path]['scale'] * (a @ b).T, expected, rtol=2e-5, atol=1e-6)


def test_ranks_and_scales_resolve_independently():
  adapters, values = read(GOLDENS / 'patterns')
  found = {path: (adapter.rank, adapter.scale) for path, adapter in adapters.items()}
  assert {path: slots['a'].shape[1] for path, slots in values.items()} == {
    path: rank for path, (rank, _) in found.items()
  }
  assert found == {
    'model.layers.0.self_attn.q_proj': (2, 3 / 2**0.5),
    'model.layers.0.self_attn.v_proj': (3, 3 / 3**0.5),
    'model.layers.0.mlp.down_proj': (2, 5 / 2**0.5),
    'model.layers.1.self_attn.q_proj': (4, 7 / 2),
    'model.layers.1.self_attn.v_proj': (3, 3 / 3**0.5),
    'model.layers.1.mlp.down_proj': (2, 3 / 2**0.5),
  }


def test_an_embedding_comes_with_the_copy_of_its_base():
  _, tensors = read_peft_folder(GOLDENS / 'embedding')
  key = 'base_model.model.model.embed_tokens'
  slots = read(GOLDENS / 'embedding')[1]['model.embed_tokens']
  assert (slots['a'].shape, slots['b'].shape) == ((40, 3), (3, 16))
  assert tensors[f'{key}.lora_embedding_A'].dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(slots['a'], tensors[f'{key}.lora_embedding_A'].T)
  np.testing.assert_array_equal(
    tensors[f'{key}.base_layer.weight'], HfWeights(GOLDENS / 'base')['model.embed_tokens.weight']
  )


@pytest.mark.parametrize('name', NAMES)
def test_slots_and_tensors_are_inverses(name):
  _, tensors = read_peft_folder(GOLDENS / name)
  adapters, values = read(GOLDENS / name)
  layers = {
    path: peft_values.Layer(
      'embedding' if 'embed' in path else 'linear',
      (slots['a'].shape[0], slots['b'].shape[1]),
    )
    for path, slots in values.items()
  }
  config, back, told = peft_writing.write(adapters, values, layers)
  assert told == adapters
  assert set(back) == {key for key in tensors if 'base_layer' not in key}
  assert all(back[key].dtype == tensors[key].dtype for key in back)
  assert all(np.ascontiguousarray(a).tobytes() == tensors[k].tobytes() for k, a in back.items())
  full = peft_config.check_config(config, subject='It', strict=True)
  again, _ = peft_values.read(full, back, subject='It')
  assert {p: (a.rank, a.scale) for p, a in again.items()} == {
    p: (a.rank, a.scale) for p, a in adapters.items()
  }


@pytest.mark.parametrize('name', NAMES)
def test_a_rewritten_folder_is_the_same(name, tmp_path):
  config, tensors = read_peft_folder(GOLDENS / name)
  write_peft_folder(tmp_path / 'again', config, tensors)
  config_again, tensors_again = read_peft_folder(tmp_path / 'again')
  assert config_again == config
  assert set(tensors_again) == set(tensors)
  for key in tensors:
    assert tensors_again[key].dtype == tensors[key].dtype
    assert tensors_again[key].tobytes() == tensors[key].tobytes()
  assert SafetensorsFile(tmp_path / 'again' / hf_peft.TENSORS).metadata == {'format': 'pt'}
  assert sorted(f.name for f in (tmp_path / 'again').iterdir()) == [hf_peft.CONFIG, hf_peft.TENSORS]


def test_a_short_config_is_completed_for_peft(tmp_path):
  config, tensors = _small()
  write_peft_folder(tmp_path / 'out', config, tensors)
  written = json.loads((tmp_path / 'out' / hf_peft.CONFIG).read_text())
  peft_own = json.loads((GOLDENS / 'plain' / hf_peft.CONFIG).read_text())
  assert set(written) <= set(peft_own)
  assert written['peft_type'] == 'LORA'
  assert written['target_modules'] == ['q_proj']


def test_dora_magnitudes_are_read_where_the_config_says_so(tmp_path):
  config, tensors = _small()
  tensors[f'{Q0}.lora_magnitude_vector'] = np.ones(3, np.float32)
  write_peft_folder(tmp_path / 'out', config | {'use_dora': True}, tensors)
  adapters, values = read(tmp_path / 'out')
  assert values['model.layers.0.self_attn.q_proj']['magnitude'].shape == (3,)
  assert type(adapters['model.layers.0.self_attn.q_proj']).__name__ == 'DoRA'
  message = (
    r"q_proj.lora_magnitude_vector' belongs to use_dora = True; the config has use_dora = None"
  )
  with pytest.raises(ValueError, match=message):
    write_peft_folder(tmp_path / 'out', config, tensors)


def test_target_names_select_exactly_the_given_layers():
  every = [f'model.layers.{i}.{name}' for i in range(2) for name in ('q_proj', 'v_proj')]
  assert peft_writing.target_names(every, among=every) == ['q_proj', 'v_proj']
  some = [every[0], every[1], every[3]]
  names = peft_writing.target_names(some, among=every)
  assert names == ['model.layers.0.q_proj', 'v_proj']
  config = {'target_modules': names}
  assert [path for path in every if peft_config.targets(config, path)] == some


def _small():
  config = {'peft_type': 'LORA', 'r': 2, 'lora_alpha': 4, 'target_modules': ['q_proj']}
  tensors = {
    f'{Q0}.lora_A.weight': np.ones((2, 5), np.float32),
    f'{Q0}.lora_B.weight': np.ones((3, 2), np.float32),
  }
  return config, tensors


# (changes of the config, changes of the tensors; None deletes) -> message
BAD = {
  'type': ({'peft_type': 'LROA'}, {}, r"has peft_type 'LROA'; did you mean 'LORA'\?"),
  'other_type': (
    {'peft_type': 'XLORA'},
    {},
    "has peft_type 'XLORA'.* Expected one of: .*IA3, .*LORA",
  ),
  'no_rank': ({'r': None}, {}, 'has no r; expected a whole number of 1 or more'),
  'rank_zero': ({'r': 0}, {}, 'has r = 0; expected a whole number'),
  'rank_text': ({'r': '2'}, {}, "has r = '2'; expected a whole number"),
  'no_alpha': ({'lora_alpha': None}, {}, 'has no lora_alpha; expected a finite number'),
  'alpha': ({'lora_alpha': float('nan')}, {}, 'has lora_alpha = nan; expected a finite number'),
  'rslora': ({'use_rslora': 'yes'}, {}, "has use_rslora = 'yes'; expected true or false"),
  'base': ({'base_model_name_or_path': 3}, {}, 'has base_model_name_or_path = 3'),
  'targets': ({'target_modules': None}, {}, 'has no target_modules; expected a list of names'),
  'regex': ({'target_modules': '(q_proj'}, {}, r"target_modules = '\(q_proj'; expected .* regex"),
  'pattern': ({'rank_pattern': {'q_proj': 'x'}}, {}, 'has rank_pattern = .*; expected an object'),
  'bias': ({'bias': 'lora_only'}, {}, "has bias = 'lora_only', which peftlab does not read"),
  'pissa': ({'init_lora_weights': 'pissa'}, {}, "init_lora_weights = 'pissa': its factors belong"),
  'saved': ({'modules_to_save': ['lm_head']}, {}, r"has modules_to_save = \['lm_head'\], which"),
  'untargeted': (
    {'target_modules': ['qproj']},
    {},
    r"target_modules \['qproj'\] does not select 'model.*q_proj'.*; did you mean 'qproj'\?",
  ),
  'whole_words': ({'target_modules': ['proj']}, {}, r"target_modules \['proj'\] does not select"),
  'no_b': (
    {},
    {'lora_B.weight': None},
    r"'model\.layers\.0.*' has lora_A\.weight; expected lora_A",
  ),
  'no_a': ({}, {'lora_A.weight': None}, r'has lora_B\.weight; expected lora_A\.weight and lora_B'),
  'rank': (
    {'r': 3},
    {},
    r'has lora_A.weight \(2, 5\) and lora_B.weight \(3, 2\); by the config its rank is 3',
  ),
  'rank_pattern': ({'rank_pattern': {'q_proj': 1}}, {}, 'by the config its rank is 1'),
  'b_shape': (
    {},
    {'lora_B.weight': np.ones((3, 4), np.float32)},
    r'and lora_B.weight \(3, 4\); by the config',
  ),
  'a_flat': (
    {},
    {'lora_A.weight': np.ones((2,), np.float32)},
    r'has lora_A.weight \(2,\) and lora_B.weight',
  ),
  'nan': ({}, {'lora_A.weight': np.full((2, 5), np.nan, np.float32)}, 'lora_A.weight. holds a NaN'),
  'inf': (
    {},
    {'lora_B.weight': np.full((3, 2), np.inf, ml_dtypes.bfloat16)},
    'lora_B.weight. holds a NaN or an infinity',
  ),
  'ints': ({}, {'lora_A.weight': np.ones((2, 5), np.int32)}, 'has dtype int32; expected a float'),
  'key': ({}, {'lora_C.weight': np.ones(2, np.float32)}, r"The key '.*'.*; did you mean 'lora_"),
  'mixed': (
    {},
    {'lora_embedding_A': np.ones((2, 5), np.float32)},
    'has lora_A.weight, lora_B.weight, lora_embedding_A; expected lora_A.weight and lora_B.weight',
  ),
  'empty': (
    {},
    {'lora_A.weight': None, 'lora_B.weight': None},
    'no tensors; expected lora_A.weight and',
  ),
}


def _changed(case):
  config_changes, tensor_changes, message = BAD[case]
  config, tensors = _small()
  config = {k: v for k, v in (config | config_changes).items() if v is not None}
  tensors |= {f'{Q0}.{end}': array for end, array in tensor_changes.items()}
  return config, {k: v for k, v in tensors.items() if v is not None}, message


@pytest.mark.parametrize('case', BAD)
def test_a_bad_folder_is_refused_by_name(case, tmp_path):
  config, tensors, message = _changed(case)
  (tmp_path / hf_peft.CONFIG).write_text(json.dumps(config))
  write_safetensors(tmp_path / hf_peft.TENSORS, tensors)
  with pytest.raises(ValueError, match=message) as error:
    read_peft_folder(tmp_path)
  assert str(tmp_path / 'adapter_') in str(error.value)


@pytest.mark.parametrize('case', BAD)
def test_what_would_be_refused_is_not_written(case, tmp_path):
  config, tensors, message = _changed(case)
  with pytest.raises(ValueError, match=message):
    write_peft_folder(tmp_path / 'out', config, tensors)
  assert not (tmp_path / 'out').exists()


def test_an_unknown_field_is_a_warning_when_read_and_an_error_when_written(tmp_path):
  config, tensors = _small()
  write_peft_folder(tmp_path, config, tensors)
  written = json.loads((tmp_path / hf_peft.CONFIG).read_text())
  (tmp_path / hf_peft.CONFIG).write_text(json.dumps(written | {'lora_alhpa': 1, 'new': {}}))
  with pytest.warns(UserWarning, match=r"'lora_alhpa'; did you mean 'lora_alpha'\? So are 'new'"):
    assert 'new' in read_peft_folder(tmp_path)[0]
  with pytest.raises(ValueError, match=r"unknown field 'lora_alhpa'; did you mean 'lora_alpha'\?"):
    write_peft_folder(tmp_path, config | {'lora_alhpa': 1}, tensors)


def test_a_target_without_tensors_is_warned_of(tmp_path):
  config, tensors = _small()
  with pytest.warns(UserWarning, match=r"names 'k_proj', for which there are no tensors"):
    write_peft_folder(tmp_path, config | {'target_modules': ['q_proj', 'k_proj']}, tensors)


def test_missing_and_damaged_files_are_named(tmp_path):
  config, tensors = _small()
  with pytest.raises(ValueError, match=r"No folder '.*none'"):
    read_peft_folder(tmp_path / 'none')
  write_peft_folder(tmp_path, config, tensors)
  file, text = tmp_path / hf_peft.TENSORS, (tmp_path / hf_peft.CONFIG).read_text()
  content = file.read_bytes()
  file.write_bytes(content[:-1])
  with pytest.raises(ValueError, match=r"adapter_model\.safetensors'.*cut short"):
    read_peft_folder(tmp_path)
  file.rename(tmp_path / 'adapter_model.bin')
  with pytest.raises(ValueError, match=r"adapter_model\.bin' is a pickle"):
    read_peft_folder(tmp_path)
  (tmp_path / 'adapter_model.bin').unlink()
  with pytest.raises(ValueError, match=r"No file '.*adapter_model\.safetensors'"):
    read_peft_folder(tmp_path)
  file.write_bytes(content)
  (tmp_path / hf_peft.CONFIG).write_text(text[:-3])
  with pytest.raises(ValueError, match=r"adapter_config\.json' is not valid JSON"):
    read_peft_folder(tmp_path)
  (tmp_path / hf_peft.CONFIG).unlink()
  with pytest.raises(ValueError, match=r"No file '.*adapter_config\.json'"):
    read_peft_folder(tmp_path)


def test_a_killed_write_leaves_no_mix_of_old_and_new(tmp_path, monkeypatch):
  config, tensors = _small()
  write_peft_folder(tmp_path, config, tensors)
  before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
  monkeypatch.setattr(hf_peft.files, 'write_json', _fail)
  with pytest.raises(OSError, match='disk full'):
    write_peft_folder(tmp_path, config | {'lora_alpha': 8}, tensors)
  assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def _fail(path, value):
  del path, value
  raise OSError('disk full')

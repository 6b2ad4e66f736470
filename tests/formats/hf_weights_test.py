"""HF model folders: one file or sharded, and everything that can be wrong with them."""

import json
import pathlib

import numpy as np
import pytest

from peftlab.formats.hf_weights import HfWeights
from peftlab.formats.safetensors_file import write_safetensors

BASE = pathlib.Path(__file__).parents[1] / 'goldens' / 'peft_lora' / 'base'


def _sharded(directory, tensors=None):
  tensors = tensors or dict(HfWeights(BASE))
  names = sorted(tensors)
  shards = {
    'model-00001-of-00002.safetensors': names[: len(names) // 2],
    'model-00002-of-00002.safetensors': names[len(names) // 2 :],
  }
  for file, held in shards.items():
    write_safetensors(directory / file, {name: tensors[name] for name in held})
  weight_map = {name: file for file, held in shards.items() for name in held}
  _index(directory, weight_map)
  (directory / 'config.json').write_bytes((BASE / 'config.json').read_bytes())
  return weight_map


def _index(directory, weight_map):
  content = json.dumps({'metadata': {}, 'weight_map': weight_map})
  (directory / 'model.safetensors.index.json').write_text(content)


def test_a_folder_written_by_transformers_is_read():
  weights = HfWeights(BASE)
  assert weights.config['num_key_value_heads'] == 2
  shapes = {name.removeprefix('model.'): info.shape for name, info in weights.tensors.items()}
  layer = {
    'input_layernorm.weight': (16,),
    'post_attention_layernorm.weight': (16,),
    'self_attn.q_proj.weight': (16, 16),
    'self_attn.k_proj.weight': (8, 16),
    'self_attn.v_proj.weight': (8, 16),
    'self_attn.o_proj.weight': (16, 16),
    'mlp.gate_proj.weight': (24, 16),
    'mlp.up_proj.weight': (24, 16),
    'mlp.down_proj.weight': (16, 24),
  }
  assert shapes == {
    'embed_tokens.weight': (40, 16),
    'norm.weight': (16,),
    'lm_head.weight': (40, 16),
    **{f'layers.{i}.{name}': shape for i in range(2) for name, shape in layer.items()},
  }
  assert weights['model.norm.weight'].dtype == np.float32


def test_shards_hold_the_same_as_one_file(tmp_path):
  _sharded(tmp_path)
  sharded, single = HfWeights(tmp_path), HfWeights(BASE)
  assert set(sharded) == set(single)
  for name in single:
    np.testing.assert_array_equal(sharded[name], single[name])


def test_an_absent_tensor_is_named_with_the_nearest():
  with pytest.raises(ValueError, match=r"'lm_head\.wieght'.*did you mean 'lm_head\.weight'"):
    HfWeights(BASE)['lm_head.wieght']


def _no_config(folder):
  _sharded(folder)
  (folder / 'config.json').unlink()


def _bad_config(folder):
  _sharded(folder)
  (folder / 'config.json').write_text('{"vocab_size": 40,}')


def _missing_shard(folder):
  _sharded(folder)
  (folder / 'model-00002-of-00002.safetensors').unlink()


def _cut_shard(folder):
  _sharded(folder)
  shard = folder / 'model-00002-of-00002.safetensors'
  shard.write_bytes(shard.read_bytes()[:-1])


def _absent_tensor(folder):
  weight_map = _sharded(folder)
  _index(folder, weight_map | {'model.norm.wight': weight_map['model.norm.weight']})


def _unnamed_tensor(folder):
  weight_map = _sharded(folder)
  del weight_map['model.norm.weight']
  _index(folder, weight_map)


def _outside(folder):
  weight_map = _sharded(folder)
  _index(folder, weight_map | {'x': '../model.safetensors'})


def _no_map(folder):
  _sharded(folder)
  (folder / 'model.safetensors.index.json').write_text('{"metadata": {}}')


def _pickle(folder):
  (folder / 'config.json').write_text('{}')
  (folder / 'pytorch_model.bin').write_bytes(b'\x80\x02}q\x00.')


def _loose(folder):
  write_safetensors(folder / 'weights.safetensors', {'x': np.ones(2, np.float32)})


CASES = {
  _no_config: r"No file '.*config\.json'",
  _bad_config: r"config\.json' is not valid JSON: .*line 1",
  _missing_shard: r"the file 'model-00002-of-00002\.safetensors', which is missing; 11 tensors",
  _cut_shard: r"model-00002-of-00002\.safetensors'.*it is cut short",
  _absent_tensor: r"says 'model\.norm\.wight' is in .*; did you mean 'model\.norm\.weight'\?",
  _unnamed_tensor: r"Tensor 'model\.norm\.weight' .* is not where the index",
  _outside: r"names the file '\.\./model\.safetensors'; expected a name in its folder",
  _no_map: 'has no weight_map',
  _pickle: r"pytorch_model\.bin' is a pickle, which can run code",
  _loose: r'has no model\.safetensors .* It holds weights\.safetensors without an index',
}


@pytest.mark.parametrize('make', CASES, ids=lambda make: make.__name__.strip('_'))
def test_a_bad_folder_is_refused_by_name(make, tmp_path):
  make(tmp_path)
  with pytest.raises(ValueError, match=CASES[make]) as error:
    HfWeights(tmp_path)
  assert str(tmp_path) in str(error.value)


def test_a_missing_folder_is_named_with_the_nearest(tmp_path):
  (tmp_path / 'llama').mkdir()
  with pytest.raises(ValueError, match=r"No folder '.*lama'; did you mean '.*llama'\?"):
    HfWeights(tmp_path / 'lama')
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='is a file; expected a folder'):
    HfWeights(tmp_path / 'file')

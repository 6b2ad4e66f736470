"""Everything that can be wrong with a folder of each type that HF PEFT has: refused by name."""

import functools
import json
import pathlib
import shutil

from flax import nnx
import numpy as np
import pytest

import peftlab
from peftlab.formats import safetensors_file
from tests.goldens import make_peft_ours as goldens

LIST = ('adalora', 'alora', 'boft', 'c3a', 'dora', 'fourierft', 'hira', 'ia3', 'miss', 'randlora')
LIST += ('shira', 'trainable_tokens', 'vblora')
FOLDERS = dict.fromkeys(LIST, 'list') | {
  'ln_tuning': 'norms',
  'loha': 'patterns',
  'lokr': 'patterns',
  'lora': 'list_modules_to_save',
  'oft': 'list_modules_to_save',
  'rslora': 'patterns',
  'vera': 'all_linear',
}
LAYER = 'base_model.model.model.layers.1.'
ONE_LAYER = ('trainable_tokens',)  # it has one layer, so that k of n cannot be


pytestmark = [
  pytest.mark.usefixtures('usual_ranks'),
  pytest.mark.filterwarnings(r'ignore:.*target_modules names .* for which there are no tensors'),
]


@functools.cache
def base():
  return peftlab.load_model(goldens.BASE)


@pytest.fixture(params=sorted(FOLDERS))
def folder(request, tmp_path):
  shutil.copytree(goldens.ZOO / request.param / FOLDERS[request.param], tmp_path / request.param)
  return tmp_path / request.param


def tensors_of(folder):
  file = safetensors_file.SafetensorsFile(folder / 'adapter_model.safetensors')
  return {key: np.array(array) for key, array in file.items()}


def change_tensors(folder, change):
  tensors = tensors_of(folder)
  changed = change(tensors)
  changed = tensors if changed is None else changed
  safetensors_file.write_safetensors(
    folder / 'adapter_model.safetensors', changed, metadata={'format': 'pt'}
  )


def change_config(folder, **changes):
  path = folder / 'adapter_config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def first(tensors):
  """The first key of a layer that the adapter is on."""
  skip = ('base_layer.weight', 'lm_head.weight', 'randlora_A', 'randlora_B')
  return sorted(k for k in tensors if '.model.model.' in k and not k.endswith(skip))[0]


def refused(folder, message):
  model = base()
  nodes = len(list(nnx.iter_graph(model)))
  with pytest.raises(ValueError, match=message) as error:
    peftlab.load_adapter(model, folder)
  assert str(folder) in str(error.value)
  assert len(list(nnx.iter_graph(model))) == nodes


def test_a_tensor_that_is_missing(folder):
  key = first(tensors_of(folder))
  change_tensors(folder, lambda tensors: {k: a for k, a in tensors.items() if k != key})
  end = key.rpartition('layers')[2].split('.', 3)[-1]
  refused(
    folder, rf'expected .*{end.rpartition(".")[2]}|has \d+ of \d+ layers|has slots|no tensors'
  )


def test_a_tensor_that_is_none_of_peft_s(folder):
  key = first(tensors_of(folder)).rpartition('.')[0] + '.lora_Q'
  change_tensors(folder, lambda tensors: tensors | {key: np.ones(3, np.float32)})
  refused(folder, "lora_Q' is not one of PEFT's")


def test_a_tensor_of_another_shape(folder):
  key = first(tensors_of(folder))
  shape = tensors_of(folder)[key].shape
  longer = np.zeros((*shape[:-1], shape[-1] + 1), tensors_of(folder)[key].dtype)
  change_tensors(folder, lambda tensors: tensors | {key: longer})
  refused(folder, 'has .*; expected|expected |must divide')


def test_a_tensor_of_another_number_of_dims(folder):
  key = first(tensors_of(folder))
  change_tensors(folder, lambda tensors: tensors | {key: tensors[key][None]})
  refused(folder, rf'{key.rpartition(".")[2]} \(1, .*expected ')


def test_a_file_without_a_tensor_of_its_type(folder):
  change_tensors(folder, lambda tensors: {'base_model.x': np.ones(1, np.float32)})
  refused(folder, "base_model.x' is not one of PEFT's|no base_model|no tensors")


def test_k_of_n_layers(folder):
  if folder.name in ONE_LAYER:
    change_config(folder, target_modules=['embed_tokens', 'q_proj'])
    with pytest.warns(UserWarning, match="names 'q_proj', for which there are no tensors"):
      peftlab.load_adapter(base(), folder)
    return
  kept = {k: a for k, a in tensors_of(folder).items() if not k.startswith(LAYER)}
  have = len({tuple(k.split('.layers.')[1].split('.')[1:3]) for k in kept if '.layers.' in k})
  change_tensors(folder, lambda tensors: kept)
  more = sum('lm_head' in k or 'model.norm' in k for k in kept)
  refused(folder, rf'has {have + more} of {2 * have + more} layers .*missing: model.layers.1')


def test_a_layer_that_the_config_does_not_select(folder):
  path = first(tensors_of(folder)).removeprefix('base_model.model.').split('.')
  change_config(folder, target_modules=['k_prjo'])
  refused(folder, rf"target_modules \['k_prjo'\].* does not select '{path[0]}")


def test_another_type(folder):
  change_config(folder, peft_type='LROA')
  refused(folder, "has peft_type 'LROA'; did you mean 'LORA'")


def test_a_key_from_the_future_is_warned_of(folder):
  change_config(folder, new_key=1)
  with pytest.warns(UserWarning, match="has the unknown field 'new_key'. It is ignored"):
    peftlab.load_adapter(base(), folder)


def test_a_number_that_is_none(folder):
  def spoil(tensors):
    key = next(k for k in sorted(tensors) if tensors[k].dtype == np.float32)
    tensors[key].flat[0] = np.nan

  change_tensors(folder, spoil)
  refused(folder, 'holds a NaN')


def test_a_file_that_is_cut_short(folder):
  path = folder / 'adapter_model.safetensors'
  path.write_bytes(path.read_bytes()[:-1])
  refused(folder, 'is cut short')


def test_a_pickle(folder):
  (folder / 'adapter_model.safetensors').rename(folder / 'adapter_model.bin')
  refused(folder, 'is a pickle')


def test_an_edit_of_our_own_folder(folder, tmp_path):
  """Every number of the config that says something of the adapter."""
  ours = tmp_path / 'ours'
  peftlab.save_adapter(peftlab.load_adapter(base(), folder), ours)
  config = json.loads((ours / 'adapter_config.json').read_text())
  edited = [
    k for k in ('lora_alpha', 'alpha', 'scaling', 'randlora_alpha', 'd_initial') if k in config
  ]
  if not edited:
    pytest.skip('its config holds no number of the adapter but sizes, which shapes tell')
  for key in edited:
    text = (ours / 'adapter_config.json').read_text()
    change_config(ours, **{key: config[key] + 1})
    refused(pathlib.Path(ours), f'was edited: adapter_config.json has .* {config[key] + 1}')
    (ours / 'adapter_config.json').write_text(text)
  peftlab.load_adapter(base(), ours)

"""Adapters on disk: bitwise, in any layout, and refused by name when something is wrong."""

import json
import pathlib

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _specs
from peftlab.formats import adapter_folder, files, safetensors_file
from peftlab.plugins.lora import LoRA
from peftlab.plugins.qwix_lora import QwixLoRA

GOLDENS = pathlib.Path(__file__).parent.parent / 'goldens'


class Block(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)


class Stacked(nnx.Module):
  def __init__(self, seed=0):
    self.embed = nnx.Embed(10, 8, rngs=nnx.Rngs(seed))
    self.layers = peftlab.stack(Block, 4, rngs=seed)


class Listed(nnx.Module):
  """The same weights as `Stacked`, a module per layer."""

  def __init__(self, seed=0):
    stacked = Stacked(seed)
    self.embed = stacked.embed
    self.layers = nnx.List([Block(nnx.Rngs(i)) for i in range(4)])
    for i, block in enumerate(self.layers):
      for name in ('up', 'down'):
        of, to = getattr(stacked.layers, name), getattr(block, name)
        to.kernel[...], to.bias[...] = of.kernel[...][i], of.bias[...][i]


EVERY = ('all-linear', 'embed')
TYPES = [LoRA(rank=2, alpha=3.0, rslora=True), QwixLoRA(rank=2)]


def trained(model, adapter, seed=0):
  """The model with an adapter none of whose trainable arrays is 0."""
  parts = peftlab.split(peftlab.attach(model, adapter, where=EVERY, rngs=seed)[0])
  moved = jax.tree.map(lambda a, t: a + 0.1 * t, parts.adapter, peftlab.trainable(parts))
  return peftlab.merge(parts.replace(adapter=moved))


@pytest.fixture(params=TYPES, ids=['peft form', 'own form'])
def saved(request, tmp_path):
  model = trained(Stacked(), request.param)
  peftlab.save_adapter(model, tmp_path / 'a')
  return model, tmp_path / 'a'


def test_save_and_load_are_bitwise_inverse(saved):
  model, folder = saved
  loaded = peftlab.load_adapter(Stacked(), folder)
  ours, theirs = peftlab.split(loaded), peftlab.split(model)
  chex.assert_trees_all_equal(ours.adapter, theirs.adapter)
  assert ours.graph == theirs.graph


def test_loading_shares_the_base_and_leaves_the_model_alone(saved):
  base = Stacked()
  loaded = peftlab.load_adapter(base, saved[1], name='other')
  assert peftlab.assert_base_shared(base, loaded) == '5/5'
  assert not hasattr(base.embed, 'adapters')
  assert loaded.embed.adapters[0].name == 'other'


def test_an_adapter_of_a_stack_loads_into_a_list_of_layers_and_back(saved, tmp_path):
  model, folder = saved
  listed = peftlab.load_adapter(Listed(), folder)
  for i in range(4):
    expected = model.layers.up.adapters[0].a[...][i]
    chex.assert_trees_all_equal(listed.layers[i].up.adapters[0].a[...], expected)
  peftlab.save_adapter(listed, tmp_path / 'b')
  again = peftlab.load_adapter(Stacked(), tmp_path / 'b')
  chex.assert_trees_all_equal(peftlab.split(again).adapter, peftlab.split(model).adapter)


def test_an_adapter_loads_on_another_mesh(saved):
  model, folder = saved
  placed, _ = _specs.place(Stacked(), _specs.make_mesh({'fsdp': 4, 'tensor': 2}))
  loaded = peftlab.load_adapter(placed, folder)
  for ours, theirs in zip(
    jax.tree.leaves(peftlab.split(loaded).adapter),
    jax.tree.leaves(peftlab.split(model).adapter),
    strict=True,
  ):
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert len(ours.sharding.device_set) == 8


def test_the_file_is_as_big_as_its_arrays_and_a_header(saved):
  model, folder = saved
  parts = peftlab.split(model)
  size = (folder / 'adapter_model.safetensors').stat().st_size
  arrays = peftlab.nbytes(parts.adapter)
  assert arrays - 9 * 4 <= size <= arrays + 4000  # the nine scales are in the config


def test_a_changed_scale_is_what_is_saved(tmp_path):
  model = peftlab.attach(Stacked(), LoRA(rank=2, alpha=4.0))[0]
  model.layers.up.adapters[0].scale[...] = jnp.asarray([1.0, 2.0, 3.0, 4.0])
  peftlab.save_adapter(model, tmp_path / 'a')
  loaded = peftlab.load_adapter(Stacked(), tmp_path / 'a')
  np.testing.assert_array_equal(loaded.layers.up.adapters[0].scale[...], [1.0, 2.0, 3.0, 4.0])
  np.testing.assert_array_equal(loaded.layers.down.adapters[0].scale[...], [2.0] * 4)


@pytest.mark.parametrize('folder', ('plain', 'embedding'))
def test_a_folder_of_hf_peft_loads_into_its_base_with_equal_logits(folder):
  golden = GOLDENS / 'peft_lora'
  expected = np.load(golden / 'logits.npz')
  tokens = jnp.asarray(expected['tokens'])
  model = peftlab.load_model(golden / 'base')
  np.testing.assert_allclose(model(tokens), expected['base'], rtol=1e-4, atol=1e-4)
  logits = peftlab.load_adapter(model, golden / folder)(tokens)
  np.testing.assert_allclose(logits, expected[folder], rtol=1e-4, atol=1e-4)


def test_another_base_of_the_same_shape_is_refused(saved):
  with pytest.raises(ValueError, match='made on another base'):
    peftlab.load_adapter(Stacked(seed=1), saved[1])
  peftlab.load_adapter(Stacked(seed=1), saved[1], any_base=True)


def test_the_same_base_in_half_precision_is_accepted(saved):
  model, folder = saved
  base = Stacked()
  parts = peftlab.split(base)
  half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), parts.base)
  loaded = peftlab.load_adapter(peftlab.merge(parts.replace(base=half)), folder)
  chex.assert_trees_all_equal(peftlab.split(loaded).adapter, peftlab.split(model).adapter)


def edit(folder, change):
  path = folder / 'peftlab.json'
  card = json.loads(path.read_text())
  change(card)
  path.write_text(json.dumps(card))


def drop_layer(folder, layer):
  path = folder / 'adapter_model.safetensors'
  tensors = dict(safetensors_file.SafetensorsFile(path))
  kept = {k: np.array(v) for k, v in tensors.items() if layer not in k}
  assert len(kept) < len(tensors)
  safetensors_file.write_safetensors(path, kept, metadata={'format': 'pt'})


def flip_a_bit(folder):
  path = folder / 'adapter_model.safetensors'
  content = bytearray(path.read_bytes())
  content[-2] ^= 0x40
  path.write_bytes(content)


@pytest.mark.parametrize(
  ('break_it', 'message'),
  (
    (
      lambda f: edit(f, lambda c: c['fields'].update(alpha=99.0)),
      'was edited after it was written',
    ),
    (lambda f: edit(f, lambda c: c.pop('type')), 'lacks type'),
    (lambda f: edit(f, lambda c: c.update(format=7)), 'has format 7; this version reads 1'),
    (lambda f: drop_layer(f, 'layers.1.up'), 'missing .*layers.1.up'),
    (lambda f: (f / 'adapter_model.safetensors').unlink(), 'adapter_model.safetensors'),
    (lambda f: (f / 'adapter_model.safetensors').write_bytes(b'cut'), 'adapter_model.safetensors'),
    (lambda f: (f / 'peftlab.json').write_text('{'), 'peftlab.json'),
    (flip_a_bit, 'was changed after it was written'),
  ),
)
def test_a_damaged_or_edited_folder_is_refused_by_name(saved, break_it, message):
  _, folder = saved
  break_it(folder)
  with pytest.raises(ValueError, match=message):
    peftlab.load_adapter(Stacked(), folder)


def test_an_edited_alpha_in_the_peft_config_is_noticed(tmp_path):
  peftlab.save_adapter(trained(Stacked(), TYPES[0]), tmp_path / 'a')
  path = tmp_path / 'a' / 'adapter_config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'lora_alpha': 5.0}))
  with pytest.raises(ValueError, match='was edited'):
    peftlab.load_adapter(Stacked(), tmp_path / 'a')


def test_a_model_without_the_layers_is_refused_with_the_nearest_name(saved):
  class Other(nnx.Module):
    def __init__(self):
      self.embed = nnx.Embed(10, 8, rngs=nnx.Rngs(0))
      self.layers = peftlab.stack(
        lambda rngs: nnx.Dict(upp=nnx.Linear(8, 12, rngs=rngs)), 4, rngs=0
      )

  with pytest.raises(ValueError, match=r"The model has no layer '.*'; did you mean"):
    peftlab.load_adapter(Other(), saved[1])


def test_nothing_is_written_for_an_adapter_with_nan(tmp_path):
  model = peftlab.attach(Stacked(), LoRA(rank=2))[0]
  model.layers.up.adapters[0].b[...] = jnp.full((4, 2, 12), jnp.inf)
  with pytest.raises(ValueError, match='holds a NaN or an infinity'):
    peftlab.save_adapter(model, tmp_path / 'a')
  assert not (tmp_path / 'a').exists()


def test_loading_twice_under_one_name_is_refused(saved):
  loaded = peftlab.load_adapter(Stacked(), saved[1])
  with pytest.raises(ValueError, match="already has an adapter named 'default'"):
    peftlab.load_adapter(loaded, saved[1])
  with pytest.raises(ValueError, match=r'^The adapter name 3 must be made of letters'):
    peftlab.load_adapter(Stacked(), saved[1], name=3)


def content(folder):
  return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob('*') if f.is_file()}


@pytest.mark.parametrize(
  ('given', 'said'),
  (
    ('', "Adapter folder is ''; expected the path"),
    (None, 'Adapter folder is None; expected the path'),
    ('file', "Adapter folder 'file' is a file; expected a folder"),
    ('none/a', "Adapter folder 'none/a' cannot be made: 'none' does not exist"),
    ('file/a', "Adapter folder 'file/a' cannot be made: 'file' is a file"),
    ('/proc/a', "Adapter folder '/proc/a' cannot be "),
  ),
)
def test_where_nothing_can_be_written_nothing_is(given, said, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').touch()
  model = peftlab.attach(Stacked(), TYPES[0])[0]
  with pytest.raises(ValueError, match=said):
    peftlab.save_adapter(model, given)
  assert [f.name for f in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('adapter', TYPES, ids=lambda a: type(a).__name__)
def test_a_disk_that_is_full_leaves_what_was_there(adapter, tmp_path, monkeypatch):
  peftlab.save_adapter(trained(Stacked(), adapter), tmp_path / 'old')
  before = content(tmp_path)

  def full(path, value):
    del path, value
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(files, 'write_json', full)
  for name in ('old', 'new'):
    with pytest.raises(ValueError, match=rf"{name}' cannot be written: No space left on device"):
      peftlab.save_adapter(trained(Stacked(), adapter, seed=1), tmp_path / name)
  assert content(tmp_path) == before
  assert [f.name for f in tmp_path.iterdir()] == ['old']


def test_another_type_in_a_folder_leaves_no_file_of_the_first(tmp_path):
  peftlab.save_adapter(trained(Stacked(), TYPES[0]), tmp_path / 'a')
  peftlab.save_adapter(trained(Stacked(), TYPES[1]), tmp_path / 'a')
  peftlab.save_adapter(trained(Stacked(), TYPES[1]), tmp_path / 'b')
  assert content(tmp_path / 'a') == content(tmp_path / 'b')


def test_a_folder_says_what_its_base_was_loaded_from(tmp_path):
  model = trained(Stacked(), TYPES[0])
  peftlab.save_adapter(model, tmp_path / 'a', source='package:some')
  peftlab.save_adapter(model, tmp_path / 'b')
  assert adapter_folder.source_of(tmp_path / 'a') == 'package:some'
  assert adapter_folder.source_of(tmp_path / 'b') == ''
  assert load(tmp_path / 'a') == load(tmp_path / 'b')
  with pytest.raises(adapter_folder.OtherBaseError, match='made on another base, package:some:'):
    peftlab.load_adapter(Stacked(seed=5), tmp_path / 'a')
  card = tmp_path / 'a' / 'peftlab.json'
  card.write_text(card.read_text().replace('package:some', 'package:other'))
  with pytest.raises(ValueError, match='was edited'):
    adapter_folder.source_of(tmp_path / 'a')


def load(folder):
  parts = peftlab.split(peftlab.load_adapter(Stacked(), folder))
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(parts.adapter)]

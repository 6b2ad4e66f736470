"""Folders of every adapter type that HF PEFT has: PEFT's own read, ours read by PEFT, one model."""

import functools
import json
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab.formats import peft_form, peft_types, safetensors_file
from tests.goldens import make_peft_ours as goldens

OURS = goldens.HERE / 'peft_ours.npz'
CASES = goldens.cases()
# Folders that adapt some layers only, of a base whose layers are stacked.
PARTIAL = ('loha/regex', 'lokr/both', 'lora/exclude', 'lora/layers', 'lora/regex')
PARTIAL += ('oft/layers_cayley', 'vera/layers')

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_ranks')


@functools.cache
def base():
  return peftlab.load_model(goldens.BASE)


@functools.cache
def loaded(case):
  """The base with the adapter of a folder of PEFT, and what was said of it."""
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter('always')
    model = peftlab.load_adapter(base(), goldens.ZOO / case)
  return model, [str(one.message) for one in said]


@pytest.mark.parametrize('case', CASES)
def test_a_folder_of_peft_gives_the_logits_of_peft(case):
  model, said = loaded(case)
  found = model(jnp.asarray(goldens.tokens(case)))
  np.testing.assert_allclose(found, goldens.logits(case), rtol=1e-4, atol=1e-4)
  assert len(said) == (case in PARTIAL)
  assert all('get a fresh adapter, which changes nothing' in one for one in said)


@pytest.mark.parametrize('case', CASES)
def test_a_folder_of_ours_is_the_one_that_peft_gave_these_logits_for(case, tmp_path):
  ours = np.load(OURS)
  peftlab.save_adapter(loaded(case)[0], tmp_path / 'a')
  if case not in PARTIAL:  # there the fresh adapters are of random numbers
    assert goldens.digest(tmp_path / 'a') == str(ours[f'{case}.digest'])
  expected = goldens.logits(case)[:, goldens.EVERY]
  np.testing.assert_allclose(ours[case], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('case', CASES)
def test_the_tensors_we_write_are_bitwise_those_we_read(case, tmp_path):
  peftlab.save_adapter(loaded(case)[0], tmp_path / 'a')
  theirs, ours = (
    dict(safetensors_file.SafetensorsFile(folder / 'adapter_model.safetensors'))
    for folder in (goldens.ZOO / case, tmp_path / 'a')
  )
  form = peft_types.of_config(config(case), subject='It')[1]
  copies = (*form.copies, 'base_layer.weight')
  theirs = {k: a for k, a in theirs.items() if k in ours or not k.endswith(copies)}
  assert set(theirs) <= set(ours)
  assert case in PARTIAL or set(theirs) == set(ours)
  for key, array in theirs.items():  # what was cut off or filled up is zeros
    whole = np.zeros(ours[key].shape, array.dtype)
    whole[tuple(slice(n) for n in array.shape)] = array
    np.testing.assert_array_equal(ours[key], whole, err_msg=key)


def config(case):
  return json.loads((goldens.ZOO / case / 'adapter_config.json').read_text())


def test_every_key_of_peft_s_configs_is_known_to_the_type():
  for case in CASES:
    form = peft_types.of_config(config(case), subject='It')[1]
    assert isinstance(form, peft_form.PeftForm)
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      from peftlab.formats import peft_config

      peft_config.check_config(config(case), subject='It', strict=True)


@pytest.mark.parametrize(
  ('case', 'message'),
  (
    ('bd_lora/list', 'has use_bdlora = '),
    ('pissa/raw', "init_lora_weights = 'pissa': its factors belong"),
    ('vblora/top_k', 'has save_only_topk_weights = True, which peftlab does not read'),
  ),
)
def test_what_cannot_be_read_is_refused_by_its_key(case, message):
  assert case in goldens.REFUSED
  with pytest.raises(ValueError, match=message):
    peftlab.load_adapter(base(), goldens.ZOO / case)


@pytest.mark.parametrize('rslora', (False, True))
def test_a_start_from_the_weights_is_written_as_lora_of_twice_the_rank(rslora, tmp_path):
  from peftlab.plugins.pissa import PiSSA

  adapter = PiSSA(rank=3, alpha=5.0, rslora=rslora)
  parts = peftlab.split(peftlab.attach(base(), adapter, where='attn.q')[0])
  moved = jax.tree.map(lambda a, t: a + 0.1 * t, parts.adapter, peftlab.trainable(parts))
  model = peftlab.merge(parts.replace(adapter=moved))
  peftlab.save_adapter(model, tmp_path / 'a')
  back = peftlab.load_adapter(base(), tmp_path / 'a')
  assert type(back.layers.attn.q.adapters[0].adapter) is PiSSA
  chex.assert_trees_all_close(peftlab.split(back).adapter, parts.replace(adapter=moved).adapter)
  (tmp_path / 'a' / 'peftlab.json').unlink()  # as PEFT has it
  plain = peftlab.load_adapter(base(), tmp_path / 'a')
  assert plain.layers.attn.q.adapters[0].adapter.rank == 6
  tokens = jnp.asarray(goldens.tokens('lora'))
  found, expected = plain(tokens), model(tokens)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert float(jnp.abs(expected - base()(tokens)).max()) > 1e-2

"""A model is written back bit by bit, under the names of its files; what changed is told."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import quant
from peftlab.formats import mxfp4
from peftlab.formats.hf_weights import HfWeights
from peftlab.formats.safetensors_file import write_safetensors
from peftlab.models.load import load_model
from peftlab.models.write import write_model
from peftlab.plugins.lora import LoRA
from tests.models import family_cases as cases
from tests.models import goldens

pytestmark = pytest.mark.usefixtures('quick_compiles')


def assert_same_tensors(found, expected):
  assert set(found) == set(expected)
  for name, array in expected.items():
    assert found[name].dtype == array.dtype, name
    assert found[name].shape == array.shape, name
    assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize('name', cases.GOLDENS)
def test_what_was_loaded_is_written_bit_by_bit(name, tmp_path):
  source = goldens.HF / name
  write_model(cases.model_of(name), tmp_path / 'x', source=source)
  assert_same_tensors(HfWeights(tmp_path / 'x'), HfWeights(source))
  assert (tmp_path / 'x' / 'config.json').read_bytes() == (source / 'config.json').read_bytes()


def test_several_files_have_an_index(tmp_path):
  source = goldens.HF / 'qwen3_moe'
  model = cases.model_of('qwen3_moe')
  write_model(model, tmp_path / 'x', source=source, shard_bytes=20_000)
  index = json.loads((tmp_path / 'x' / 'model.safetensors.index.json').read_text())
  files = sorted(path.name for path in (tmp_path / 'x').glob('*.safetensors'))
  assert len(files) > 2
  assert sorted(set(index['weight_map'].values())) == files
  sizes = {name: array.nbytes for name, array in HfWeights(source).items()}
  assert index['metadata']['total_size'] == sum(sizes.values())
  for file in files:
    held = [sizes[name] for name, where in index['weight_map'].items() if where == file]
    assert len(held) == 1 or sum(held) <= 20_000
  assert_same_tensors(HfWeights(tmp_path / 'x'), HfWeights(source))


def test_the_dtype_can_be_chosen(tmp_path):
  write_model(
    cases.model_of('llama32'), tmp_path / 'x', source=goldens.HF / 'llama32', dtype='float32'
  )
  assert {array.dtype for array in HfWeights(tmp_path / 'x').values()} == {np.dtype('float32')}


def test_an_untied_head_is_written_and_told(tmp_path):
  model = load_model(goldens.HF / 'gemma3_wrapped')
  model.untie()
  write_model(model, tmp_path / 'x', source=goldens.HF / 'gemma3_wrapped')
  config = json.loads((tmp_path / 'x' / 'config.json').read_text())
  assert config['text_config']['tie_word_embeddings'] is False
  held = HfWeights(tmp_path / 'x')
  head, table = (held[f'language_model.{n}.weight'] for n in ('lm_head', 'model.embed_tokens'))
  np.testing.assert_array_equal(np.asarray(head, np.float32), np.asarray(table, np.float32))
  assert not load_model(tmp_path / 'x').tied


def test_weights_that_are_no_codes_any_more_are_written_as_numbers(tmp_path):
  model = load_model(goldens.HF / 'gpt_oss_mxfp4')
  down = model.layers.mlp.experts.down.kernel
  down[...] = down[...].at[1, 2, 0, 0].add(0.3)
  write_model(model, tmp_path / 'x', source=goldens.HF / 'gpt_oss_mxfp4')
  config = json.loads((tmp_path / 'x' / 'config.json').read_text())
  assert 'quantization_config' not in config
  held = HfWeights(tmp_path / 'x')
  assert not [name for name in held if name.endswith(('_blocks', '_scales'))]
  again = load_model(tmp_path / 'x')
  for path in ('gate_up', 'down'):
    ours, theirs = (getattr(m.layers.mlp.experts, path).kernel[...] for m in (model, again))
    np.testing.assert_allclose(ours, theirs, rtol=2**-8)  # bfloat16


FP8 = {'quant_method': 'fp8', 'weight_block_size': [16, 16], 'fmt': 'e4m3'}


def test_a_quantized_model_is_refused_or_written_as_numbers(tmp_path):
  source = goldens.HF / 'mixtral'
  model, _ = quant.quantize(cases.model_of('mixtral'), 'int8', tile=4)
  with pytest.raises(
    ValueError, match=r'has quantized weights \(layers\..* dequantize=True.*export'
  ):
    write_model(model, tmp_path / 'x', source=source)
  assert not (tmp_path / 'x').exists()
  write_model(model, tmp_path / 'x', source=source, dequantize=True)
  found, plain = HfWeights(tmp_path / 'x'), HfWeights(source)
  assert set(found) == set(plain)
  held = np.asarray(model.layers.attn.q.kernel.get_raw_value().dense(jnp.float32))  # [layers, ...]
  name = 'model.layers.1.self_attn.q_proj.weight'
  written, before = np.asarray(found[name]), np.asarray(plain[name])
  assert written.dtype == before.dtype
  np.testing.assert_array_equal(written, held[1].reshape(held.shape[1], -1).T.astype(before.dtype))
  lost = np.abs(written.astype(np.float32) - before.astype(np.float32)).max()
  assert 0 < lost < 0.05


def test_fp8_is_decoded_and_written_back(tmp_path):
  source, coded = HfWeights(goldens.HF / 'deepseek_v3'), {}
  draw = np.random.default_rng(0)
  for name, array in source.items():
    if 'q_a_proj' in name or 'experts' in name:
      codes = (np.asarray(array, np.float32) * 100).astype(jnp.float8_e4m3fn)
      blocks = [-(-n // 16) for n in array.shape]
      coded[name] = codes
      coded[name + '_scale_inv'] = draw.uniform(0.005, 0.02, blocks).astype(np.float32)
  # Layer 4 of 4 predicts several tokens ahead.
  behind = {'model.layers.4.eh_proj.weight': np.ones((2, 2), np.float32)}
  folder = goldens.edited(
    'deepseek_v3', tmp_path / 'x', {'quantization_config': FP8}, coded | behind
  )
  model = load_model(folder)
  name = 'model.layers.2.self_attn.q_a_proj.weight'
  scales = coded[name + '_scale_inv']
  each = np.kron(scales, np.ones((16, 16), np.float32))[:16, :24]
  expected = coded[name].astype(np.float32) * each
  np.testing.assert_array_equal(model.layers[1].attn.q_down.kernel[1], expected.T)
  write_model(model, tmp_path / 'y', source=folder)
  assert_same_tensors(HfWeights(tmp_path / 'y'), HfWeights(folder))


def test_mxfp4_is_what_the_standard_says():
  # E2M1 with a scale of 2 ** (129 - 127): codes 0 to 15 in order, low four bits first.
  codes = np.arange(16, dtype=np.uint8)
  blocks = (codes[0::2] | codes[1::2] << 4)[None, :].repeat(2, 0).reshape(1, 16)
  found = mxfp4.decode(blocks, np.array([129], np.uint8))
  values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 4
  np.testing.assert_array_equal(found, np.tile([*values, *-values], 2))
  np.testing.assert_array_equal(mxfp4.encode(found, np.array([129], np.uint8)), blocks)
  assert mxfp4.encode(found + 0.1, np.array([129], np.uint8)) is None


def test_a_header_that_begins_like_a_pickle_is_no_pickle(tmp_path):
  # 640 = 0x0280: the first bytes of the file are 80 02, as of a pickle of protocol 2.
  names = {f'tensor{i:02}': np.zeros(1, np.float32) for i in range(9)}
  for padding in range(64):
    write_safetensors(tmp_path / 'x.safetensors', names, metadata={'x': 'y' * padding})
    if (tmp_path / 'x.safetensors').read_bytes()[:2] == b'\x80\x02':
      return
  raise AssertionError('No header of 640 bytes was made.')


def test_what_cannot_be_written_is_named(tmp_path):
  source = goldens.HF / 'llama32'
  model = cases.model_of('llama32')
  adapted, _ = peftlab.attach(model, LoRA(rank=1), where='attn.q')
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'a').touch()
  for args, options, message in (
    ((adapted, tmp_path / 'x'), {}, 'The model has adapters; merge them'),
    ((model, tmp_path / 'full'), {}, 'exists and is not an empty folder'),
    ((model, tmp_path / 'x'), {'dtype': 'bf16'}, "dtype is 'bf16'; did you mean 'bfloat16'"),
    ((model, tmp_path / 'x'), {'shard_bytes': 0}, 'shard_bytes is 0; it must be at least 1'),
    (
      (model, tmp_path / 'x'),
      {'source': goldens.HF / 'llama_tied'},
      r"tensor 'model.* of shape \(\d+, \d+\); the model's is",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      write_model(*args, **({'source': source} | options))
  en = load_model('package:glassllm/en')
  with pytest.raises(ValueError, match="family 'glassllm' has no Hugging Face form"):
    write_model(en, tmp_path / 'y', source=source)

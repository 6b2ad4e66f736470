"""`peftlab merge`, `export` and `convert`, against the logits that PEFT and transformers gave."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import peftlab
from peftlab import cli
from peftlab.formats import safetensors_file
from peftlab.models.load import load_model

GOLDEN = pathlib.Path(__file__).parent.parent / 'goldens' / 'peft_lora'
BASE, PLAIN = str(GOLDEN / 'base'), str(GOLDEN / 'plain')
MAXTEXT = {
  'self_attn.q_proj': 'self_attention/query',
  'self_attn.k_proj': 'self_attention/key',
  'self_attn.v_proj': 'self_attention/value',
  'self_attn.o_proj': 'self_attention/out',
  'mlp.gate_proj': 'mlp/wi_0',
  'mlp.up_proj': 'mlp/wi_1',
  'mlp.down_proj': 'mlp/wo',
}
HEAD = 4  # head_dim

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(scope='module')
def golden():
  return np.load(GOLDEN / 'logits.npz')


def assert_logits(model, expected, golden):
  found = model(jnp.asarray(golden['tokens']))
  np.testing.assert_allclose(found, golden[expected], rtol=1e-4, atol=1e-4)


def run(capsys, *argv):
  """(exit code, what stands on stderr)."""
  code = cli.main([str(a) for a in argv])
  return code, capsys.readouterr().err


def factors():
  """{(module, layer): (a [in, rank], b [rank, out])} of the golden adapter."""
  tensors = safetensors_file.SafetensorsFile(GOLDEN / 'plain' / 'adapter_model.safetensors')
  found = {}
  for layer in range(2):
    for module in MAXTEXT:
      path = f'base_model.model.model.layers.{layer}.{module}'
      found[module, layer] = tensors[f'{path}.lora_A.weight'].T, tensors[f'{path}.lora_B.weight'].T
  return found


def as_maxtext(module, b):
  """b as MaxText has it: queries divided by sqrt(head_dim), halves of a rotation side by side."""
  heads = b.reshape(b.shape[0], -1, HEAD)
  if module.endswith(('q_proj', 'k_proj')):
    one, other = heads[..., : HEAD // 2], heads[..., HEAD // 2 :]
    heads = np.stack([one, other], -1).reshape(heads.shape)
  if module.endswith('q_proj'):
    heads = heads / np.sqrt(HEAD)
  return heads if 'self_attn' in module else b


def test_merge_of_halves_of_one_adapter_is_it(tmp_path, golden, capsys):
  adapters = [f'--adapter={PLAIN}', f'--adapter={PLAIN}']
  out = tmp_path / 'both'
  code, _ = run(capsys, 'merge', f'--base={BASE}', *adapters, '--weights=0.5,0.5', f'--out={out}')
  assert code == 0
  assert_logits(peftlab.load_adapter(load_model(BASE), out), 'plain', golden)
  assert json.loads((out / 'adapter_config.json').read_text())['r'] == 4


@pytest.mark.parametrize(
  ('more', 'message'),
  (
    ((), 'There is no adapter'),
    ((f'--adapter={PLAIN}', '--weights=1,2'), '2 numbers for 1 adapters'),
    ((f'--adapter={PLAIN}', '--weights=a'), 'something else than numbers'),
    ((f'--adapter={PLAIN}',), '--out is missing'),
    ((f'--adapter={PLAIN}', '--out=OUT', '--method=sum'), "No method 'sum'"),
  ),
)
def test_merge_says_what_is_wrong_in_one_line_and_writes_nothing(more, message, tmp_path, capsys):
  out = tmp_path / 'out'
  code, said = run(
    capsys, 'merge', f'--base={BASE}', *(str(m).replace('OUT', str(out)) for m in more)
  )
  assert code == 2
  assert message in said
  assert not out.exists()


@pytest.mark.parametrize(
  'command',
  (
    ('merge', '--adapter={}', f'--adapter={PLAIN}'),
    ('convert', '--from=hf', '--source={}'),
  ),
)
def test_what_is_read_is_not_written_over(command, tmp_path, capsys):
  folder = shutil.copytree(PLAIN, tmp_path / 'mine')
  before = {file.name: file.read_bytes() for file in folder.iterdir()}
  again = folder.parent / '.' / 'mine'
  given = (argument.format(folder) for argument in command)
  code, said = run(capsys, *given, f'--base={BASE}', f'--out={again}')
  assert code == 2
  assert 'is read for what is written; expected another folder' in said
  assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_folder_of_something_else_is_not_written_into(tmp_path, capsys):
  folder = tmp_path / 'run'
  (folder / 'checkpoints').mkdir(parents=True)
  given = [f'--adapter={PLAIN}', f'--adapter={PLAIN}', f'--base={BASE}', f'--out={folder}']
  code, said = run(capsys, 'merge', *given)
  assert code == 2
  assert "run' holds checkpoints and no adapter_config.json; expected an empty folder" in said
  assert [path.name for path in folder.iterdir()] == ['checkpoints']


def test_the_base_of_a_folder_that_tells_it_need_not_be_given(tmp_path, golden, capsys):
  adapted = peftlab.load_adapter(load_model(BASE), PLAIN)
  peftlab.save_adapter(adapted, tmp_path / 'mine', source=BASE)
  out = tmp_path / 'out'
  code, said = run(capsys, 'convert', '--from=hf', f'--source={tmp_path / "mine"}', f'--out={out}')
  assert code == 0, said
  assert_logits(peftlab.load_adapter(load_model(BASE), out), 'plain', golden)


def test_export_is_a_folder_with_the_adapter_merged_in(tmp_path, golden, capsys):
  out = tmp_path / 'out'
  code, _ = run(capsys, 'export', f'--base={BASE}', f'--adapter={PLAIN}', f'--out={out}')
  assert code == 0
  assert_logits(load_model(out), 'plain', golden)
  theirs = safetensors_file.SafetensorsFile(GOLDEN / 'base' / 'model.safetensors')
  ours = safetensors_file.SafetensorsFile(out / 'model.safetensors')
  assert {n: (i.shape, i.dtype) for n, i in ours.tensors.items()} == {
    n: (i.shape, i.dtype) for n, i in theirs.tensors.items()
  }
  same = [n for n in ours if np.array_equal(ours[n], theirs[n])]
  assert sorted(same) == sorted(n for n in ours if 'norm' in n or 'embed' in n or 'lm_head' in n)
  assert (out / 'config.json').read_text() == (GOLDEN / 'base' / 'config.json').read_text()


def test_export_of_a_base_that_is_no_folder_says_what_it_needs(tmp_path, capsys):
  code, said = run(capsys, 'export', '--base=package:glassllm/en', f'--out={tmp_path / "out"}')
  assert code == 2
  assert 'expected --like=DIR' in said


def test_convert_takes_a_peft_folder(tmp_path, golden, capsys):
  out = tmp_path / 'out'
  code, _ = run(
    capsys, 'convert', '--from=hf', f'--source={PLAIN}', f'--base={BASE}', f'--out={out}'
  )
  assert code == 0
  assert (out / 'peftlab.json').is_file()
  assert_logits(peftlab.load_adapter(load_model(BASE), out), 'plain', golden)


def stacked():
  """MaxText's scanned layout: layers at axis 1, under `params`, beside a base array."""
  found, arrays = factors(), {'params/decoder/layers/mlp/wo/kernel': np.ones((24, 2, 16))}
  for module, theirs in MAXTEXT.items():
    a, b = ([found[module, i][k] for i in range(2)] for k in (0, 1))
    b = [as_maxtext(module, one) for one in b]
    if module == 'self_attn.o_proj':
      a, b = [one.reshape(4, HEAD, -1) for one in a], [one.reshape(4, -1) for one in b]
      # [heads, head_dim, rank] with the layers at axis 1
    path = f'params/decoder/layers/{theirs}/kernel_lora'
    arrays |= {f'{path}_a/value': np.stack(a, 1), f'{path}_b/value': np.stack(b, 1)}
  return arrays


def single():
  """One module per layer, `layers_0`, without any wrapper."""
  return {
    f'decoder/layers_{layer}/{MAXTEXT[module]}/kernel_lora_{k}': v
    for (module, layer), (a, b) in factors().items()
    for k, v in (('a', a), ('b', as_maxtext(module, b)))
  }


def tunix():
  """Tunix's names: a number per layer, `w` of an einsum with heads, `{value: ...}` leaves."""
  arrays = {}
  for (module, layer), (a, b) in factors().items():
    name = module.replace('self_attn', 'attn')
    weight = 'w' if 'attn' in name else 'kernel'
    if module == 'self_attn.o_proj':
      a = a.reshape(4, HEAD, -1)
    elif weight == 'w':
      b = b.reshape(4, -1, HEAD)
    path = f'layers/{layer}/{name.replace(".", "/")}/{weight}_lora'
    arrays |= {f'{path}_a/value': a, f'{path}_b/value': b}
  return arrays


@pytest.mark.parametrize(
  ('origin', 'layout'), (('maxtext', stacked), ('maxtext', single), ('tunix', tunix))
)
def test_convert_takes_the_layouts_of_other_trainers(origin, layout, tmp_path, golden, capsys):
  np.savez(tmp_path / 'lora.npz', **layout())
  source, out = f'--source={tmp_path / "lora.npz"}', tmp_path / 'out'
  told = (f'--from={origin}', source, f'--base={BASE}', '--alpha=8', f'--out={out}')
  code, said = run(capsys, 'convert', *told)
  assert code == 0, said
  assert_logits(peftlab.load_adapter(load_model(BASE), out), 'plain', golden)


def save(path, arrays):
  if path.suffix == '.npz':
    np.savez(path, **arrays)
  else:  # keys of a file with dots, as other trainers write them
    dotted = {k.replace('/', '.'): np.ascontiguousarray(v) for k, v in arrays.items()}
    safetensors_file.write_safetensors(path, dotted)


@pytest.mark.parametrize('name', ('lora.npz', 'lora.safetensors'))
@pytest.mark.parametrize('dtype', (np.float32, ml_dtypes.bfloat16), ids=('float32', 'bfloat16'))
def test_convert_keeps_every_number_bit_for_bit(name, dtype, tmp_path, capsys):
  save(tmp_path / name, {key: array.astype(dtype) for key, array in tunix().items()})
  out = tmp_path / 'out'
  told = (f'--source={tmp_path / name}', f'--base={BASE}', '--alpha=8', f'--out={out}')
  code, said = run(capsys, 'convert', '--from=tunix', *told)
  assert code == 0, said
  ours = safetensors_file.SafetensorsFile(out / 'adapter_model.safetensors')
  theirs = safetensors_file.SafetensorsFile(GOLDEN / 'plain' / 'adapter_model.safetensors')
  assert set(ours) == set(theirs)
  for key in theirs:
    np.testing.assert_array_equal(ours[key], theirs[key].astype(dtype).astype(np.float32))


def test_a_peft_folder_comes_through_bit_for_bit(tmp_path, capsys):
  out = tmp_path / 'out'
  told = (f'--source={PLAIN}', f'--base={BASE}', f'--out={out}')
  assert run(capsys, 'convert', '--from=hf', *told)[0] == 0
  names = ('adapter_model.safetensors',)
  assert [(out / n).read_bytes() for n in names] == [
    (GOLDEN / 'plain' / n).read_bytes() for n in names
  ]


def test_convert_reads_an_orbax_folder(tmp_path, golden, capsys):
  import orbax.checkpoint as ocp

  tree = {}
  for key, array in tunix().items():
    *words, last = key.split('/')
    inside = tree
    for word in words:
      inside = inside.setdefault(word, {})
    inside[last] = array
  ocp.PyTreeCheckpointer().save(tmp_path / 'checkpoint', tree)
  out = tmp_path / 'out'
  told = (f'--source={tmp_path / "checkpoint"}', f'--base={BASE}', '--alpha=8', f'--out={out}')
  code, said = run(capsys, 'convert', '--from=tunix', *told)
  assert code == 0, said
  assert_logits(peftlab.load_adapter(load_model(BASE), out), 'plain', golden)


@pytest.mark.parametrize(
  ('change', 'message'),
  (
    (lambda arrays: {'x': np.ones(3)}, 'has no LoRA factors among 1 arrays'),
    (lambda arrays: dict(list(arrays.items())[:1]), 'has lora_a alone'),
    (
      lambda arrays: {k.replace('q_proj', 'qq'): v for k, v in arrays.items()},
      "no layer 'layers.attn.qq'; did you mean 'q'",
    ),
    (lambda arrays: {k.replace('s/1/', 's/7/'): v for k, v in arrays.items()}, 'of number 7'),
    (lambda arrays: {k: v[..., :3] for k, v in arrays.items()}, 'has factors'),
    (lambda arrays: {k: v for k, v in arrays.items() if '/1/' not in k}, 'has 7 of 14 layers'),
  ),
)
def test_convert_refuses_what_does_not_fit(change, message, tmp_path, capsys):
  np.savez(tmp_path / 'lora.npz', **change(tunix()))
  source, out = f'--source={tmp_path / "lora.npz"}', tmp_path / 'out'
  code, said = run(
    capsys, 'convert', '--from=tunix', source, f'--base={BASE}', '--alpha=8', f'--out={out}'
  )
  assert code == 2
  assert message in said
  assert not out.exists()


def test_convert_needs_the_alpha_that_the_file_does_not_hold(tmp_path, capsys):
  told = ('--source=x', f'--out={tmp_path / "out"}')
  assert '--alpha is missing' in run(capsys, 'convert', '--from=maxtext', *told)[1]
  assert 'says its own' in run(capsys, 'convert', '--from=hf', '--alpha=1', *told)[1]

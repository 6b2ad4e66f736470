"""`peftlab generate` continues prompts by the base and by adapters."""

import pathlib

import jax
import pytest

import peftlab
from peftlab import cli, serve
from peftlab.data import tokenizers
from peftlab.data.tokenizers import load_tokenizer
from peftlab.models.load import load_model
from peftlab.plugins.lora import LoRA
from peftlab.serve import text
from tests.models import goldens

BASE = 'package:glassllm/en'
PROMPT = 'once upon a time'

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(scope='module')
def base():
  return load_model(BASE)


@pytest.fixture(scope='module')
def adapted(base):
  model, _ = peftlab.attach(base, LoRA(rank=2))
  parts = peftlab.split(model)
  leaves = jax.tree.map(lambda a: a + 0.1, parts.adapter)
  return peftlab.merge(parts.replace(adapter=leaves))


@pytest.fixture(scope='module')
def folder(adapted, tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp('adapters') / 'mine'
  peftlab.save_adapter(adapted, path, source=BASE)
  return path


def expected(model, prompt=PROMPT, **options):
  tokenizer = load_tokenizer(BASE)
  ids = text.prompt_ids(tokenizer, prompt)
  options = {'max_tokens': 8, 'stop': (tokenizer.eos_id,)} | options
  return text.text_of(tokenizer, ids, serve.generate(model, [ids], **options)[0])


def run(*arguments: str) -> int:
  return cli.main(['generate', f'--base={BASE}', '--max_tokens=8', *arguments])


def test_says_what_the_base_says(base, capsys):
  assert run(f'--prompt={PROMPT}') == 0
  said = capsys.readouterr()
  assert said.out == expected(base) + '\n'
  assert said.err == ''


def test_says_what_the_adapter_says(base, adapted, folder, capsys):
  assert run(f'--prompt={PROMPT}', f'--adapter={folder}') == 0
  said = capsys.readouterr().out
  assert said == expected(adapted) + '\n'
  assert said != expected(base) + '\n'


def test_draws_by_its_seed(base, capsys):
  how = serve.Sampling(temperature=1.0, top_k=20, top_p=0.9)
  flags = ('--temperature=1', '--top_k=20', '--top_p=0.9', '--seed=5')
  assert run(f'--prompt={PROMPT}', *flags) == 0
  assert capsys.readouterr().out == expected(base, sampling=how, seed=5) + '\n'


def test_compares_side_by_side(base, adapted, folder, capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '150')
  assert run(f'--prompt={PROMPT}', f'--adapter={folder}', '--compare') == 0
  prompt, titles, _, *lines, _ = capsys.readouterr().out.splitlines()
  assert prompt == f'> {PROMPT}'
  assert [cell.strip() for cell in titles.split('|')] == ['base', str(folder)]
  columns = [[line.split('|')[i].strip() for line in lines] for i in range(2)]
  for column, model in zip(columns, (base, adapted), strict=True):
    assert ' '.join(' '.join(column).split()) == ' '.join(expected(model).split())


def test_continues_several_prompts(base, tmp_path, capsys):
  file = tmp_path / 'prompt.txt'
  file.write_text('the bird\nwas\n', encoding='utf-8')
  assert run(f'--prompt={PROMPT}', f'--prompt_file={file}') == 0
  told = capsys.readouterr().out.split('> ')
  assert told[0] == ''
  for said, prompt in zip(told[1:], (PROMPT, 'the bird\nwas'), strict=True):
    assert said.strip() == f'{prompt}\n{expected(base, prompt)}'.strip()


def test_help_lists_every_flag_and_loads_nothing(capsys):
  assert cli.main(['generate', '--help']) == 0
  told = capsys.readouterr().out
  for flag in ('base', 'adapter', 'prompt', 'prompt_file', 'chat', 'compare', 'seed', 'top_p'):
    assert f'--{flag}' in told


@pytest.mark.parametrize('flag', ('--chat', '--no-chat', '--nochat'))
def test_chat_can_be_switched(flag, capsys):
  code = run(f'--prompt={PROMPT}', flag, '--temperature=-1')
  assert code == 2
  assert 'temperature' in capsys.readouterr().err


def plain(*arguments):
  return cli.main(['generate', f'--prompt={PROMPT}', '--max_tokens=8', *map(str, arguments)])


def test_the_base_is_that_of_the_adapter(adapted, folder, capsys):
  assert plain(f'--adapter={folder}') == 0
  assert capsys.readouterr().out == expected(adapted) + '\n'


def test_an_adapter_of_another_base_is_refused_with_both_and_with_the_flag(folder, capsys):
  assert plain(f'--adapter={folder}', '--base=package:glassllm/pt') == 2
  told = capsys.readouterr().err
  assert f"'{folder}' was trained on another base: {BASE}, not package:glassllm/pt." in told
  assert '--any_base takes it all the same' in told
  assert plain(f'--adapter={folder}', '--base=package:glassllm/pt', '--any_base') == 0


def test_adapters_of_two_bases_need_a_base(adapted, folder, tmp_path, capsys):
  peftlab.save_adapter(adapted, tmp_path / 'other', source='package:glassllm/pt')
  assert plain(f'--adapter={folder}', f'--adapter={tmp_path}/other', '--compare') == 2
  told = capsys.readouterr().err
  assert f"'{folder}' on {BASE}, '{tmp_path}/other' on package:glassllm/pt. Expected --base" in told


def test_a_base_that_is_gone_is_told_with_the_adapter(adapted, tmp_path, capsys):
  peftlab.save_adapter(adapted, tmp_path / 'mine', source='gone.gguf')
  assert plain(f'--adapter={tmp_path}/mine') == 2
  told = capsys.readouterr().err
  assert "No model 'gone.gguf'" in told
  assert f"'{tmp_path}/mine' was trained on it; expected --base=SOURCE" in told


def test_layers_of_another_base_are_told_with_both_bases(folder, capsys):
  llama = goldens.HF / 'llama'
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tokenizers, 'load_tokenizer', lambda source: load_tokenizer(BASE))
    assert plain(f'--adapter={folder}', f'--base={llama}') == 2
  told = capsys.readouterr().err
  assert f'It was trained on {BASE}; the base here is {llama}. Expected --base=SOURCE.' in told


def test_each_prompt_has_its_own_adapter_or_none(base, adapted, folder, capsys):
  told = ['generate', '--each', '--max_tokens=5']
  told += [f'--prompt={PROMPT}', f'--adapter={folder}', f'--prompt={PROMPT}', '--adapter=none']
  assert cli.main(told) == 0
  shown = capsys.readouterr().out
  tokenizer = load_tokenizer(BASE)
  ids = text.prompt_ids(tokenizer, PROMPT)
  for model in (adapted, base):
    said = serve.generate(model, [ids], max_tokens=5, stop=(tokenizer.eos_id,))[0]
    words = text.text_of(tokenizer, ids, said).split()
    assert ' '.join(words) in ' '.join(shown.split())


def test_each_needs_as_many_adapters_as_prompts(folder, capsys):
  told = ['generate', '--each', f'--prompt={PROMPT}', f'--prompt={PROMPT}', f'--adapter={folder}']
  assert cli.main(told) == 2
  assert '--each needs an adapter for each prompt (2), given 1' in capsys.readouterr().err

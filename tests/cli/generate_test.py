"""`peftlab generate` continues prompts by the base and by adapters."""

import pathlib

import jax
import pytest

import peftlab
from peftlab import cli, serve
from peftlab.data.tokenizers import load_tokenizer
from peftlab.models.load import load_model
from peftlab.plugins.lora import LoRA
from peftlab.serve import text

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
  peftlab.save_adapter(adapted, path)
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

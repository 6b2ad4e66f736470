"""Bad input: one clear line, exit code 2, no traceback, nothing half-written."""

import pathlib
import re

import pytest

from peftlab import cli
from peftlab.experiments import demo

NAME = '--config=glassllm_lora'
FOLDER = pathlib.Path(demo.__file__).parent

# What is given -> what the line must say.
FLAGS = {
  'no_command': (('trian',), "No command 'trian'; did you mean 'train'?"),
  'no_config': (
    ('train',),
    '--config is missing; expected a file, or one of: ablation, demo, glassllm_lora',
  ),
  'unknown_flag': (
    ('train', NAME, '--wrokdir=x'),
    "No flag '--wrokdir'; did you mean '--workdir'?",
  ),
  'argument': (('train', NAME, 'x'), "Unexpected argument 'x'"),
  'bool_flag': (('train', NAME, '--overwrite=maybe'), "Flag --overwrite is 'maybe'"),
  'unknown_name': (('train', '--config=smolm2_lora'), "did you mean 'smollm2_lora'?"),
  'unknown_file': (
    ('train', f'--config={FOLDER}/dem.py'),
    f"No experiment file '{FOLDER}/dem.py'; did you mean '{FOLDER}/demo.py'?",
  ),
  'field': (
    ('train', NAME, '--config.adapter.rnak=16'),
    "No flag '--config.adapter.rnak'; did you mean '--config.adapter.rank'?",
  ),
  'section': (('train', NAME, '--config.adaptr.rank=16'), "did you mean '--config.adapter.rank'?"),
  'wrong_section': (
    ('train', NAME, '--config.data.learning_rate=1'),
    "did you mean '--config.train.learning_rate'?",
  ),
  'whole_section': (('train', NAME, '--config.train=x'), 'Flag --config.train is a section'),
  'no_value': (('train', NAME, '--config.seed'), 'Flag --config.seed has no value; expected int.'),
  'int': (('train', NAME, '--config.seed=x'), "Flag --config.seed is 'x'; expected int."),
  'int_float': (('train', NAME, '--config.train.steps=1.5'), "is '1.5'; expected int."),
  'float': (('train', NAME, '--config.train.b1=x'), "is 'x'; expected float."),
  'bool': (('train', NAME, '--config.data.shuffle=x'), "is 'x'; expected bool."),
  'nan': (('train', NAME, '--config.train.eps=nan'), 'train.eps is nan; expected a finite number.'),
  'inf': (('train', NAME, '--config.adapter.alpha=inf'), 'adapter.alpha is inf; expected a finite'),
  'adapter': (('train', NAME, '--config.adapter=lroa'), "No adapter 'lroa'; did you mean 'lora'?"),
  'other_adapter': (
    ('train', '--config.adapter.dropuot=1', NAME),
    "did you mean '--config.adapter.dropout'?",
  ),
  'optimizer': (('train', NAME, '--config.train.optimizer=liom'), "did you mean 'lion'?"),
  'schedule': (('train', NAME, '--config.train.schedule=cosin'), "did you mean 'cosine'?"),
  'dtype': (('train', NAME, '--config.base.dtype=float64'), 'Choices: bfloat16, float16, float32.'),
  'objective': (('train', NAME, '--config.data.objective=sf'), "did you mean 'sft'?"),
  'split': (('train', NAME, '--config.data.split=hsah'), "did you mean 'hash'?"),
  'steps': (('train', NAME, '--config.train.steps=0'), 'train.steps is 0; it must be at least 1.'),
  'warmup': (
    ('train', NAME, '--config.train.warmup_steps=101'),
    'train.warmup_steps is 101; it must be between 0 and 100.',
  ),
  'b2': (('train', NAME, '--config.train.b2=2'), 'train.b2 is 2.0; it must be between 0 and 1.'),
  'spike': (('train', NAME, '--config.train.spike_skip=0.5'), 'it must be above 1, or 0'),
  'role': (('train', NAME, '--config.train.role_rates=b16'), 'expected ROLE=NUMBER'),
  'role_nan': (('train', NAME, '--config.train.role_rates=b=nan'), 'expected a finite number'),
  'role_below': (('train', NAME, '--config.train.role_rates=b=-1'), 'at least 0.'),
  'role_twice': (('train', NAME, '--config.train.role_rates=b=1,b=2'), "has the role 'b' twice"),
  'accumulate': (('train', NAME, '--config.train.accumulate=3'), 'it must divide data.batch (8).'),
  'seed': (('train', NAME, '--config.seed=-1'), 'seed is -1; it must be between 0 and'),
  'mesh': (('train', NAME, '--config.mesh.data=0'), 'mesh.data is 0; it must be at least 1'),
  'mesh_rest': (
    ('train', NAME, '--config.mesh.data=-1', '--config.mesh.fsdp=-1'),
    'mesh has -1 at more than one axis',
  ),
  'mesh_devices': (
    ('train', NAME, '--config.mesh.fsdp=64'),
    'which needs 64 devices; there are 8.',
  ),
  'mesh_part': (
    ('train', NAME, '--config.mesh.fsdp=-1', '--config.mesh.tensor=3'),
    'mesh.fsdp is -1, the rest of 8 devices, which 3 does not divide.',
  ),
  'mesh_batch': (
    ('train', NAME, '--config.mesh.data=8', '--config.data.batch=4'),
    'data.batch is 4; on a mesh of',
  ),
  'source': (('train', NAME, '--config.base.source=no/such'), "No model 'no/such'"),
  'package': (('train', NAME, '--config.base.source=package:glasslm/en'), "'glassllm/en'?"),
  'applier': (('train', NAME, '--config.base.applier=scna'), "did you mean 'scan'?"),
  'remat': (('train', NAME, '--config.base.remat=fulll'), "did you mean 'full'?"),
  'corpus': (('train', NAME, '--config.data.corpus=chitchta'), "did you mean 'chitchat'?"),
  'where': (('train', NAME, '--config.where=atn.q'), "did you mean 'attn.q'?"),
  'exclude': (('train', NAME, '--config.exclude=all-linear'), 'leaves no layer to adapt'),
  'rank': (('train', NAME, '--config.adapter.rank=0'), 'rank is 0; it must be at least 1.'),
  'init': (('train', NAME, '--config.adapter.init=zero'), "No LoRA init 'zero'"),
  'role_unknown': (('train', NAME, '--config.train.role_rates=c=2'), 'Choices: a, b.'),
  'adapters': (('train', NAME, '--config.adapters=mlp'), 'expected PATTERN=TYPE or PATTERN=TYPE('),
  'adapters_type': (
    ('train', NAME, '--config.adapters=mlp=droa(rank=2)'),
    "adapters has 'mlp=droa(rank=2)': No adapter 'droa'; did you mean 'dora'?",
  ),
  'adapters_field': (
    ('train', NAME, '--config.adapters=mlp=dora(rnak=2)'),
    "no field 'rnak'; did you mean 'rank'? Fields of dora: ",
  ),
  'adapters_value': (
    ('train', NAME, '--config.adapters=mlp=dora(rank=x)'),
    "adapters has 'mlp=dora(rank=x)': rank is 'x' (str); expected int.",
  ),
  'adapters_range': (
    ('train', NAME, '--config.adapters=mlp=dora(rank=0)'),
    'DoRA.rank is 0; it must be at least 1.',
  ),
  'adapters_twice': (
    ('train', NAME, '--config.adapters=mlp=dora,mlp=lora'),
    "adapters has the pattern 'mlp' twice",
  ),
  'adapters_where': (
    ('train', NAME, '--config.adapters=mpl=dora'),
    "'mpl' matches no layer; did you mean 'mlp'?",
  ),
  'patterns': (('train', NAME, '--config.patterns=attn.q=4'), 'expected PATTERN:FIELD=VALUE'),
  'patterns_field': (
    ('train', NAME, '--config.patterns=attn.q:rnak=4'),
    "no adapter has a field 'rnak'; did you mean 'rank'?",
  ),
  'patterns_where': (
    ('train', NAME, '--config.patterns=atn.q:rank=4'),
    "'atn.q' matches no layer; did you mean 'attn.q'?",
  ),
  'patterns_value': (
    ('train', NAME, '--config.patterns=attn.q:rank=4.5'),
    "rank=4.5' is 4.5 (float); expected int.",
  ),
  'dry_run': (('train', NAME, '--dry_run', '--config.where=atn.q'), "did you mean 'attn.q'?"),
  'demo_flag': (('demo', '--step=3'), "No flag '--step'; did you mean '--steps'?"),
  'demo_steps': (('demo', '--steps=0'), 'steps'),
}


def one_line(capsys, *argv):
  code = cli.main([str(a) for a in argv])
  error = capsys.readouterr().err
  assert code == 2, error
  assert len(error.splitlines()) == 1, error
  assert error.startswith('peftlab: ')
  assert re.search(r'[.?]$|\.$', error.strip()), error
  return error


@pytest.mark.parametrize('case', FLAGS)
def test_flags(case, tmp_path, capsys):
  argv, told = FLAGS[case]
  workdir = [f'--workdir={tmp_path / "new" / "w"}'] if argv[0] in ('train', 'demo') else []
  assert told in one_line(capsys, *argv, *workdir)
  assert not (tmp_path / 'new' / 'w').exists()


CONFIG = """from peftlab.train.config import Experiment

def get_config():
  return Experiment({})
"""
EXPERIMENTS = {
  'syntax': ('def get_config(:\n', 'line 1: '),
  'import': ('import no_such_module\n', "line 1: ModuleNotFoundError: No module named 'no_such"),
  'no_function': ('x = 1\n', 'has no function get_config().'),
  'nothing': ('def get_config():\n  return None\n', 'gives a NoneType, expected an Experiment.'),
  'field': (
    CONFIG.format('sede=1'),
    "line 4: TypeError: Experiment.__init__() got an unexpected keyword argument 'sede'",
  ),
  'type': (CONFIG.format('seed="a"'), "seed is 'a' (str); expected int."),
  'section': (CONFIG.format('data=3'), 'data is 3; expected a DataConfig.'),
  'adapter': (
    CONFIG.format('adapter="lora"'),
    "adapter is 'lora'; expected an instance of a registered type: ",
  ),
}


@pytest.mark.parametrize('case', EXPERIMENTS)
def test_experiment_files(case, tmp_path, capsys):
  content, told = EXPERIMENTS[case]
  path = tmp_path / 'mine.py'
  path.write_text(content)
  assert told in one_line(capsys, 'train', f'--config={path}', f'--workdir={tmp_path / "w"}')
  assert not (tmp_path / 'w').exists()


DATA = {
  'json': ('a.jsonl', '{"text": "a"}\nnot json\n', "Row 2 of '"),
  'keys': ('a.jsonl', '{"txet": "a"}\n', "Row 1 of '"),
  'empty': ('a.jsonl', '', 'has no rows'),
  'blank': ('a.txt', ' \n\n', 'has no text'),
  'kind': ('a.csv', 'a,b\n', 'Expected a .txt or .jsonl file, or one of: chitchat, gsm8k'),
  'small': ('a.jsonl', '{"text": "a"}\n', 'leaves nothing'),
}


@pytest.mark.parametrize('case', DATA)
def test_data_files(case, tmp_path, capsys):
  name, content, told = DATA[case]
  path = tmp_path / name
  path.write_text(content)
  flags = (f'--config.data.corpus={path}', f'--workdir={tmp_path / "w"}')
  assert told in one_line(capsys, 'train', NAME, *flags)
  assert not (tmp_path / 'w').exists()


def test_a_damaged_config_in_the_workdir(tmp_path, capsys):
  workdir = pathlib.Path(tmp_path / 'w')
  workdir.mkdir()
  (workdir / 'config.json').write_text('{"name": ')
  (workdir / 'metrics.jsonl').write_text('{}\n')
  told = one_line(capsys, 'train', NAME, f'--workdir={workdir}')
  assert "config.json' is not valid JSON" in told
  assert sorted(f.name for f in workdir.iterdir()) == ['.lock', 'config.json', 'metrics.jsonl']


def test_a_run_without_config_in_the_workdir(tmp_path, capsys):
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  told = one_line(capsys, 'train', NAME, f'--workdir={tmp_path}')
  assert 'has metrics.jsonl but no config.json; give another workdir, or --overwrite' in told


def test_a_workdir_that_is_a_file(tmp_path, capsys):
  (tmp_path / 'f').write_text('')
  assert 'is a file; expected a folder.' in one_line(
    capsys, 'train', NAME, f'--workdir={tmp_path / "f"}'
  )

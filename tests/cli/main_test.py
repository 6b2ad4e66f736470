"""The command: quick to answer, without a device; a whole run from flags to page."""

import json
import os
import pathlib
import subprocess
import sys

from absl import flags
import pytest

from peftlab import cli
from peftlab.train import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(*argv, **env):
  return subprocess.run(
    [sys.executable, '-m', 'peftlab', *argv],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | env,
    timeout=300,
    check=False,
  )


@pytest.mark.parametrize('argv', ((), ('--help',), ('train', '--help'), ('demo', '--help')))
def test_help_touches_no_device_and_is_quick(argv):
  start = os.times().children_user
  done = command(*argv, JAX_PLATFORMS='no_such_platform')
  spent = os.times().children_user - start
  assert done.returncode == 0, done.stderr
  libraries = [sys.executable, '-c', 'import jax, flax.nnx, optax']
  subprocess.run(libraries, check=True, timeout=300)
  least = os.times().children_user - start - spent
  assert spent < 2.2 * least, f'{spent:.1f} CPU seconds, {least:.1f} for its libraries alone'


def test_help_lists_every_field_with_its_default(capsys):
  assert cli.main(['train', '--help']) == 0
  text = capsys.readouterr().out
  for line in ('--config.adapter=lora', '--config.adapter.rank=8', '--config.train.steps=100'):
    assert line in text
  assert 'dropout on the input of A' in text


def test_every_subcommand_is_listed(capsys):
  assert cli.main([]) == 0
  text = capsys.readouterr().out
  for name in ('train', 'demo', 'adapters', 'check'):
    assert f'  {name} ' in text


def test_adapters_lists_the_registered_types(capsys):
  assert cli.main(['adapters']) == 0
  text = capsys.readouterr().out
  rows = {line.split()[0]: line.split() for line in text.splitlines()}
  assert 'merges' in rows['adapter']
  # Trainable numbers on Linear(48 -> 32), as the papers' formulas give them.
  counts = {'lora': 320, 'dora': 352, 'vera': 36, 'ia3': 32, 'loha': 640, 'lokr': 88, 'oft': 168}
  counts |= {'boft': 224, 'randlora': 288, 'shira': 320, 'hira': 320, 'miss': 128, 'c3a': 192}
  counts |= {'adalora': 324, 'fourierft': 20}
  assert {name: int(rows[name][-1]) for name in counts} == counts


def test_a_defect_keeps_its_traceback(monkeypatch):
  def fail(argv):
    del argv
    raise ValueError('deep below')

  def run(argv):
    del argv
    return int('x')

  from peftlab.cli import adapters

  monkeypatch.setattr(adapters, 'run', fail)
  with pytest.raises(ValueError, match='deep below'):
    cli.main(['adapters'])
  monkeypatch.setattr(adapters, 'run', run)
  with pytest.raises(ValueError, match='invalid literal'):
    cli.main(['adapters'])


FLAGS = (
  '--config=glassllm_lora',
  '--config.adapter.rank=2',
  '--config.train.steps=3',
  '--config.data.max_rows=20',
  '--config.data.length=16',
  '--config.data.eval_rows=8',
  '--config.train.sample_tokens=4',
)


def test_a_whole_run_and_what_it_leaves(tmp_path, capsys):
  argv = ['train', *FLAGS, f'--workdir={tmp_path / "w"}']
  assert cli.main(argv) == 0
  out = capsys.readouterr().out
  assert '"rank": 2' in out
  assert '100.0 % of 720,384 linear weights' in out
  names = {f.name for f in (tmp_path / 'w').iterdir()}
  assert {'config.json', 'metrics.jsonl', 'summary.json', 'index.html', 'adapter'} <= names
  assert any(name.startswith('events.out.tfevents') for name in names)
  summary = json.loads((tmp_path / 'w' / 'summary.json').read_text())
  assert summary['runs'][0]['status'] == 'ok'
  kinds = [(r['kind'], r['step']) for r in metrics.read_metrics(tmp_path / 'w')]
  assert kinds[0] == ('eval', 0)
  assert ('train', 3) in kinds
  assert 'peftlab train --config=glassllm_lora' in (tmp_path / 'w' / 'index.html').read_text()

  assert cli.main(argv) == 0
  assert 'holds this run, complete' in capsys.readouterr().out

  assert cli.main([*argv, '--config.seed=1']) == 2
  error = capsys.readouterr().err
  assert 'differs in seed (0 there, 1 here)' in error
  assert len(error.splitlines()) == 1


def test_absl_flags_of_the_process_are_left_alone():
  before = set(flags.FLAGS)
  cli.main(['adapters'])
  assert set(flags.FLAGS) == before

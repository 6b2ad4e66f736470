"""Several processes of one run: the bits of one, in either direction; they stop and fail together.

The runs are trials of a sweep, so that its launcher is in it too.
"""

import json
import os
import shutil
import signal

import pytest

from peftlab.cli import _experiments
from peftlab.sweep import trials
from tests.train import several

NAMES = ('status', 'steps', 'held_out_before', 'held_out_after', 'train_loss', 'bytes', 'trainable')
FILES = ('adapter/adapter_model.safetensors', 'adapter/peftlab.json')


@pytest.fixture(scope='module')
def experiment(tmp_path_factory):
  return several.write(tmp_path_factory.mktemp('tiny'))


@pytest.fixture(scope='module')
def whole(experiment):
  """The folder of a trial that one process has done without a break."""
  (setting,) = _experiments.sweeps(str(experiment))['rank']()
  (trial,) = trials.expand(_experiments.load(str(experiment)), [{**setting, 'seed': 0}])
  folder = experiment.parent / 'whole' / trial.id
  ((code, output),) = several.train(experiment, folder, '--trial', f'--config.name={trial.id}')
  assert code == 0, output
  return folder


def assert_same(folder, whole):
  """The bits of another run: its records, its adapter, the losses of its items, its row."""
  assert several.records(folder) == several.records(whole)
  for name in FILES:
    assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
  found, expected = (json.loads((f / 'row.json').read_text()) for f in (folder, whole))
  assert {n: found[n] for n in NAMES} == {n: expected[n] for n in NAMES}


def test_two_go_on_behind_one_are_killed_start_again_stop_and_one_ends_it(experiment, whole):
  root = experiment.parent / 'sweep'
  trial = root / whole.name
  for name in ('checkpoints/2', 'config.json', 'metrics.jsonl'):  # as if stopped behind step 2
    path = trial / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if (whole / name).is_dir() else shutil.copy)(whole / name, path)
  log = root / 'logs' / f'{trial.name}.txt'

  def starts():
    return log.read_text().count('continues from step 2 of 6') if log.exists() else 0

  flags = ('--sweep=rank', '--seeds=1', f'--root={root}', '--processes=2')
  launcher = several.start(experiment, 'sweep', *flags, devices=4, seconds=0.7)
  several.wait(lambda: starts() == 1, launcher)
  (second,) = several.processes(trial, 1)
  os.kill(second, signal.SIGKILL)
  several.wait(lambda: starts() == 2, launcher)  # the first process alone speaks
  launcher.send_signal(signal.SIGTERM)
  ((code, output),) = several.ended([launcher])
  assert code == 42, output
  assert f'{trial.name}: ended with -9 (start 1); goes on from what is saved' in output
  assert not (trial / 'row.json').exists()
  saved = max(int(path.name) for path in (trial / 'checkpoints').glob('[0-9]*'))
  done = [r['step'] for r in several.records(trial) if r['kind'] == 'train']
  assert 2 < saved == done[-1] < 6
  ((code, output),) = several.train(experiment, trial, '--trial', f'--config.name={trial.name}')
  assert code == 0, output
  assert f'continues from step {saved} of 6' in output
  assert_same(trial, whole)


def test_what_does_not_fit_together_is_one_line_in_each_process(experiment):
  folder = experiment.parent / 'refused'
  more = [[], ['--config.train.steps=7']]
  started = [
    several.start(experiment, 'train', f'--workdir={folder}', *place, *own, devices=1)
    for place, own in zip(several.places(2), more, strict=True)
  ]
  for code, output in several.ended(started):
    lines = [line for line in output.splitlines() if line.startswith('peftlab: Process')]
    assert code == 2, output
    assert lines == [
      'peftlab: Process 1 has another config than process 0: "steps": 6 there, "steps": 7 here.'
    ]
  assert not folder.exists()


def test_a_quantized_base_that_two_wrote_serves_one_bit_by_bit(experiment, tmp_path):
  flags = ('--config.base.quant=nf4', '--config.base.tile=auto')
  saved = f'--config.base.saved={tmp_path / "base"}'
  folders = {name: tmp_path / name for name in ('two', 'again', 'alone')}
  runs = {'two': (2, saved), 'again': (1, saved), 'alone': (1,)}
  for name, (count, *more) in runs.items():
    for code, output in several.train(experiment, folders[name], *flags, *more, count=count):
      assert code == 0, output
    if name == 'two':
      written = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / 'base').rglob('*'))
      assert (tmp_path / 'base' / 'about.json').exists()
  assert written == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / 'base').rglob('*'))
  expected = several.records(folders['alone'])
  assert expected
  for name in ('two', 'again'):
    assert several.records(folders[name]) == expected
    for file in FILES:
      assert (folders[name] / file).read_bytes() == (folders['alone'] / file).read_bytes()

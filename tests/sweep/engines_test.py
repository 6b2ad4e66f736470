"""Engines: options, exit codes, the JobSet manifest, SLURM's local executor."""

import pathlib
import re
import threading
import time

import pytest
import yaml

from peftlab.sweep.engines import engine
from tests.sweep import jobset_crd
from tests.sweep.made_jobs import job, program

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize('more', ((), ('claim=sweeps', 'hosts=4', 'topology=4x4', 'chips=4')))
def test_a_jobset_fits_the_schema(tmp_path, more):
  made = engine.make('jobset', ['image=example/peftlab:1', *more])
  text = made.render(job(tmp_path, 'train', '--config=x.py', "--config.where=('q', 'v')"))
  assert not made.starts
  (found,) = yaml.safe_load_all(text)
  jobset_crd.check(jobset_crd.JOBSET, found)
  spec = found['spec']['replicatedJobs'][0]['template']['spec']
  (container,) = spec['template']['spec']['containers']
  assert container['command'] == ['peftlab', 'train', '--config=x.py', "--config.where=('q', 'v')"]
  assert spec['parallelism'] == spec['completions'] == (4 if more else 1)
  (rule,) = spec['podFailurePolicy']['rules']
  assert rule['onExitCodes']['values'] == [42, 134, 137, 139, 143]
  assert spec['backoffLimit'] == 0
  assert found['spec']['failurePolicy']['maxRestarts'] == 5


def test_a_jobset_is_the_golden_one(tmp_path):
  made = engine.make('jobset', ['image=example/peftlab:1', 'queue=tpus', 'claim=sweeps'])
  text = made.render(job(tmp_path, 'train', '--config=x.py', '--workdir=/sweep/t0123456789ab'))
  golden = ROOT / 'tests' / 'goldens' / 'jobset.yaml'
  assert text == golden.read_text().rstrip('\n')


def test_a_jobset_without_an_image_is_refused(tmp_path):
  with pytest.raises(ValueError, match='image'):
    engine.make('jobset').render(job(tmp_path, 'train'))


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  (
    ('locl', (), "No engine 'locl'; did you mean 'local'?"),
    ('jobset', ('imag=x',), "no option 'imag=x'; did you mean 'image'?"),
    ('jobset', ('hosts=two',), "hosts of engine jobset is 'two'; expected int."),
    ('jobset', ('hosts=0',), 'at least 1 each'),
  ),
)
def test_what_is_wrong_with_an_engine_is_said(name, options, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    engine.make(name, options)


def test_every_engine_is_known_and_list_prints_a_command_line(tmp_path):
  assert {'jobset', 'list', 'local', 'slurm'} <= set(engine.engines.names())
  text = engine.make('list').render(job(tmp_path, 'train', "--config.where=('q', 'v')"))
  assert text == """peftlab train '--config.where=('"'"'q'"'"', '"'"'v'"'"')'"""


def test_codes_after_which_a_command_starts_again():
  again = [c for c in (0, 1, 2, 42, 130, 134, 137, 139, 143, -9, -15) if engine.starts_again(c)]
  assert again == [42, 134, 137, 139, 143, -9, -15]


def test_the_local_engine_returns_the_exit_code_and_keeps_the_output(tmp_path):
  local = engine.make('local', [program('import sys; print(sys.argv[1]); sys.exit(7)')])
  one = job(tmp_path, 'hello')
  assert local.run(one) == 7
  assert one.log.read_text() == 'hello\n'


def test_stopping_the_local_engine_ends_what_runs_and_starts_nothing(tmp_path):
  local = engine.make('local', [program('import time; time.sleep(60)')])
  codes = []
  thread = threading.Thread(target=lambda: codes.append(local.run(job(tmp_path))))
  thread.start()
  while not local._running:
    time.sleep(0.01)
  local.stop()
  thread.join(20)
  assert codes == [-15]
  assert local.run(job(tmp_path)) == 42


def test_slurm_by_submitits_local_executor(tmp_path):
  pytest.importorskip('submitit', reason='submitit (the extra slurm) is not installed')
  slurm = engine.make('slurm', ['cluster=local', 'every=0.1', 'minutes=1'])
  ok, wrong = job(tmp_path, '--help', name='a'), job(tmp_path, 'no_such_command', name='b')
  assert slurm.run(ok) == 0
  assert 'peftlab SUBCOMMAND' in ok.log.read_text()
  assert slurm.run(wrong) == 2
  slurm.stop()
  assert slurm.run(ok) == 42

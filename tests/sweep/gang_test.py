"""Several processes of one trial: each knows its place, and they end together with one code."""

import pathlib
import re
import signal
import sys
import threading
import time

import pytest
import yaml

from peftlab.sweep import jobs
from peftlab.sweep.engines import engine, gang
from peftlab.train import joining
from tests.sweep import jobset_crd
from tests.sweep.made_jobs import job, program

ROOT = pathlib.Path(__file__).resolve().parents[2]


def several(tmp_path, *argv, count=2):
  return job(tmp_path, *argv, processes=count)


def local(code):
  return engine.make('local', [program(code)])


def scripted(tmp_path, body):
  """A local engine whose processes run `body`, with `me` their number."""
  path = tmp_path / 'body.py'
  path.write_text(f"import os, sys, time\nme = int(os.environ['JAX_PROCESS_ID'])\n{body}\n")
  return engine.make('local', [f'program={sys.executable} {path}'])


def test_each_process_is_told_its_place(tmp_path, monkeypatch):
  monkeypatch.setenv(joining.ID, '7')  # of the launcher itself: not passed on
  names = [joining.COORDINATOR, joining.COUNT, joining.ID]
  code = f'import os; print(*[os.environ.get(n) for n in {names}], flush=True)'
  three = several(tmp_path, count=3)
  assert local(code).run(three) == 0
  found = [line.split() for line in three.log.read_text().splitlines()]
  assert sorted(i for _, _, i in found) == ['0', '1', '2']
  ((coordinator, count),) = {(c, n) for c, n, _ in found}
  assert count == '3'
  assert re.fullmatch(r'127\.0\.0\.1:\d+', coordinator)
  alone = job(tmp_path, name='alone')
  assert local(code).run(alone) == 0
  assert alone.log.read_text().split() == ['None'] * 3


def test_the_first_that_ends_badly_ends_all_and_is_the_cause(tmp_path, monkeypatch):
  monkeypatch.setattr(gang, 'LOST', 0.5)
  body = 'os.kill(os.getpid(), 9) if me else time.sleep(60)'
  started = time.monotonic()
  assert scripted(tmp_path, body).run(several(tmp_path)) == -signal.SIGKILL
  assert time.monotonic() - started < 30


@pytest.mark.parametrize(
  ('body', 'code'),
  (
    ('time.sleep(0.2 * me)', 0),
    ('time.sleep(0.5 * me); sys.exit(134 if me else 2)', 2),
    ('time.sleep(0.5 * (1 - me)); sys.exit(1 if me else 134)', 1),
    ('time.sleep(1.0 * me); sys.exit(42)', 42),
    ('time.sleep(0.5 * (1 - me)); sys.exit(0 if me else 7)', 7),
  ),
)
def test_a_gang_has_one_exit_code(tmp_path, body, code):
  assert scripted(tmp_path, body).run(several(tmp_path)) == code


def test_those_that_save_are_waited_for(tmp_path, monkeypatch):
  monkeypatch.setattr(gang, 'LOST', 0.1)
  body = f"time.sleep(1.0 * me); open('{tmp_path}/saved' + str(me), 'w'); sys.exit(42)"
  assert scripted(tmp_path, body).run(several(tmp_path)) == 42
  assert (tmp_path / 'saved1').exists()


def test_stopping_ends_all_of_them(tmp_path):
  made = scripted(tmp_path, 'time.sleep(60)')
  codes = []
  thread = threading.Thread(target=lambda: codes.append(made.run(several(tmp_path))))
  thread.start()
  while not made._running:
    time.sleep(0.01)
  (running,) = made._running.values()
  made.stop()
  thread.join(20)
  assert codes == [-signal.SIGTERM]
  assert all(process.poll() is not None for process in running.processes)


def test_a_jobset_of_several_hosts_is_the_golden_one(tmp_path):
  options = ['image=example/peftlab:1', 'topology=4x4', 'chips=4']
  four = several(tmp_path, 'train', '--config=x.py', '--trial', count=4)
  text = engine.make('jobset', options).render(four)
  golden = ROOT / 'tests' / 'goldens' / 'jobset_hosts.yaml'
  assert text == golden.read_text().rstrip('\n')
  (found,) = yaml.safe_load_all(text)
  jobset_crd.check(jobset_crd.JOBSET, found)
  spec = found['spec']['replicatedJobs'][0]['template']['spec']
  assert (spec['parallelism'], spec['completions'], spec['completionMode']) == (4, 4, 'Indexed')
  (container,) = spec['template']['spec']['containers']
  told = {item['name']: item.get('value') for item in container['env']}
  first = 't0123456789ab-trial-0-0.t0123456789ab:8476'  # JobSet's name of its first pod
  assert told == {joining.COORDINATOR: first, joining.COUNT: '4', joining.ID: None}


def test_hosts_and_processes_that_do_not_agree_are_refused(tmp_path):
  made = engine.make('jobset', ['image=x', 'hosts=4'])
  with pytest.raises(ValueError, match=r'--processes is 2 and --option=hosts= 4'):
    made.render(several(tmp_path))


def test_list_leaves_it_to_the_tool_that_starts_them(tmp_path):
  assert engine.make('list').render(several(tmp_path, 'train')) == 'peftlab train --distributed'


def test_several_processes_do_not_pack():
  assert jobs.pack_size('auto', processes=2) is None
  with pytest.raises(ValueError, match=r"--pack is '8' and --processes 2, but a pack is one proc"):
    jobs.pack_size('8', processes=2)


def test_slurm_tells_each_task_its_place(tmp_path, monkeypatch):
  pytest.importorskip('submitit', reason='submitit (the extra slurm) is not installed')
  from peftlab.sweep.engines import slurm

  monkeypatch.setenv('SUBMITIT_EXECUTOR', 'slurm')
  for name, value in {
    'SLURM_JOB_ID': '123',
    'SLURM_NTASKS': '4',
    'SLURM_JOB_NUM_NODES': '1',
    'SLURM_PROCID': '2',
  }.items():
    monkeypatch.setenv(name, value)
  place = slurm._place()
  assert (place.count, place.id) == (4, 2)
  assert place.coordinator.startswith('127.0.0.1:')
  with pytest.raises(ValueError, match=r'--processes is 3 and --option=tasks_per_node=2'):
    engine.make('slurm', ['tasks_per_node=2']).run(several(tmp_path, count=3))

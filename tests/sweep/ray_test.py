"""The engine `ray` on a fake TPU slice of two hosts on this machine; one of them is lost."""

import importlib.util
import json
import os
import pathlib
import re
import sys
import threading
import time

import pytest

from peftlab.sweep import launch
from peftlab.sweep.engines import engine

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = 't0123456789ab'

# A trial of two processes: each says where it is; at its first start it waits until it is killed.
TRIAL = """
import json, os, pathlib, sys, time
root = pathlib.Path(sys.argv[1])
me = os.environ['JAX_PROCESS_ID']
start = len(list(root.glob(f'start-{me}-*')))
place = [os.environ[f'JAX_{n}'] for n in ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID')]
(root / f'start-{me}-{start}').write_text(json.dumps([place, os.getpid()]))
if not start:
  time.sleep(300)
if me == '0':
  folder = root / sys.argv[2]
  folder.mkdir()
  row = {'status': 'ok', 'steps': 1, 'held_out_before': 2.0, 'held_out_after': 1.0}
  (folder / 'row.json').write_text(json.dumps(row))
"""


def test_without_ray_one_line_says_what_to_install(monkeypatch):
  known = importlib.util.find_spec
  monkeypatch.setattr('importlib.util.find_spec', lambda n: None if n == 'ray' else known(n))
  with pytest.raises(
    ValueError, match=r"^The engine ray needs Ray: pip install 'peftlab\[ray\]'.$"
  ):
    engine.make('ray')


def add_host(cluster, number):
  """A host of a slice v6e-8, as Ray sees one on GKE."""
  head = {'TPU-v6e-8-head': 1} if number == 0 else {}
  return cluster.add_node(
    num_cpus=2,
    resources={'TPU': 4} | head,
    object_store_memory=80 * 1024**2,
    labels={
      'ray.io/tpu-slice-name': 'slice-0',
      'ray.io/tpu-worker-id': str(number),
      'ray.io/tpu-pod-type': 'v6e-8',
      'ray.io/accelerator-type': 'TPU-V6E',
    },
  )


@pytest.fixture(scope='module')
def cluster():
  """A cluster of a head and a slice of two hosts."""
  pytest.importorskip('ray', reason='Ray (the extra ray) is not installed')
  import ray
  from ray import cluster_utils

  patch = pytest.MonkeyPatch()
  patch.setenv('RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO', '0')
  patch.setenv('TPU_NAME', 'slice-0')  # GKE's word for the slice of a host
  patch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
  head = {'num_cpus': 0, 'object_store_memory': 80 * 1024**2, 'include_dashboard': False}
  made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
  hosts = [add_host(made, number) for number in range(2)]
  yield made, hosts
  ray.shutdown()
  made.shutdown()
  patch.undo()


def wait_for(found, what, seconds=120):
  last = time.monotonic() + seconds
  while not found():
    assert time.monotonic() < last, what
    time.sleep(0.1)


def starts(root, number):
  """[(place, process id) at each start] of the first or second process."""
  paths = sorted(root.glob(f'start-{number}-*'))
  return [json.loads(path.read_text()) for path in paths]


def is_running(process):
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  state = pathlib.Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[0]
  return state != 'Z'


@pytest.mark.filterwarnings('ignore')
def test_a_slice_of_another_size_is_refused(cluster, tmp_path):
  made = engine.make('ray', [f'address={cluster[0].address}', 'topology=v6e:2x4'])
  job = engine.Job(name=NAME, ids=(NAME,), argv=(), root=tmp_path, processes=3)
  with pytest.raises(ValueError, match=r'has 2 hosts; expected --processes=2, not 3'):
    made.run(job)


@pytest.mark.filterwarnings('ignore')
def test_a_host_that_is_lost_takes_the_gang_with_it_which_starts_again(cluster, tmp_path):
  cluster, hosts = cluster
  script = tmp_path / 'trial.py'
  script.write_text(TRIAL)
  options = [f'address={cluster.address}', 'topology=v6e:2x4', f'program={sys.executable} {script}']
  made = engine.make('ray', [*options, 'every=0.1'])
  argv = (str(tmp_path), NAME)
  job = engine.Job(name=NAME, ids=(NAME,), argv=argv, root=tmp_path, processes=2)
  lines, ended = [], []

  def run():
    try:
      ended.append(launch.launch([job], made, say=lines.append))
    except Exception as error:  # noqa: BLE001
      ended.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  wait_for(lambda: ended or (starts(tmp_path, 0) and starts(tmp_path, 1)), 'no process has begun')
  assert not ended
  cluster.remove_node(hosts[1], allow_graceful=False)
  (_, first), (_, second) = starts(tmp_path, 0)[0], starts(tmp_path, 1)[0]
  wait_for(lambda: not is_running(first), 'the process that is left was not stopped')
  wait_for(lambda: not is_running(second), 'the process of the lost host runs on')
  add_host(cluster, 1)
  thread.join(120)
  assert ended == [True], (ended, lines)
  assert f'{NAME}: ended with 137 (start 1); goes on from what is saved' in lines
  assert lines[-1] == f'{NAME}: ok, held-out loss 2.0000 -> 1.0000 in 1 steps'
  for number in range(2):
    places = [place for place, _ in starts(tmp_path, number)]
    assert [place[1:] for place in places] == [['2', str(number)]] * 2
  assert starts(tmp_path, 0)[0][0][0] == starts(tmp_path, 1)[0][0][0]  # one coordinator for both
  # Ray says which process is on which host.
  assert re.search('the host of process [01] was lost', job.log.read_text())
  made.stop()
  assert made.run(job) == 42


def test_several_hosts_need_a_cluster(tmp_path, monkeypatch):
  pytest.importorskip('ray', reason='Ray (the extra ray) is not installed')
  monkeypatch.delenv('RAY_ADDRESS', raising=False)
  job = engine.Job(name=NAME, ids=(NAME,), argv=(), root=tmp_path, processes=2)
  with pytest.raises(ValueError, match=r'no cluster but this machine, and --processes 2 needs'):
    engine.make('ray').run(job)

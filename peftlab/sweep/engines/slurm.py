"""The engine `slurm`: a SLURM job per job, by submitit; or processes here, to try it out."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import Any
import zlib

from peftlab.sweep.engines import engine, gang
from peftlab.train import joining


@engine.engines.register('slurm')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(engine.Engine):
  """SLURM by submitit (the extra `slurm`); --jobs caps how many are in the queue.

  Attributes:
    cluster: 'slurm', 'local' (processes here, to try it out), or '' for what there is.
    partition: of the jobs; '': the default one.
    minutes: a job may take; then SLURM ends it, and it goes on in the next one.
    gpus: of a node.
    cpus: of a process.
    memory_gb: of a node; 0: the default.
    tasks_per_node: processes of a trial on one node; the other nodes have the others.
    parameters: further ones for sbatch, 'account=x,qos=y'.
    every: seconds between looks at a job.
  """

  cluster: str = ''
  partition: str = ''
  minutes: int = 60
  gpus: int = 0
  cpus: int = 1
  memory_gb: int = 0
  tasks_per_node: int = 1
  parameters: tuple[str, ...] = ()
  every: float = 1.0
  _running: dict[str, Any] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )
  _lock: threading.Lock = dataclasses.field(
    default_factory=threading.Lock, init=False, repr=False, compare=False
  )
  _stopped: threading.Event = dataclasses.field(
    default_factory=threading.Event, init=False, repr=False, compare=False
  )

  def __post_init__(self):
    if importlib.util.find_spec('submitit') is None:
      raise ValueError("The engine slurm needs submitit: pip install 'peftlab[slurm]'.")

  def run(self, job: engine.Job) -> int:
    """Submits a job and waits for its end.

    Raises:
      ValueError: its processes do not divide into nodes.
    """
    self._nodes(job)
    with self._lock:
      if self._stopped.is_set():
        return engine.STOPPED
      job.log.parent.mkdir(parents=True, exist_ok=True)
      submitted = self._executor(job).submit(_call, job.argv, str(job.log))
      self._running[job.name] = submitted
    while not submitted.done():
      time.sleep(self.every)
    with self._lock:
      self._running.pop(job.name)
    failed = submitted.exception()
    if failed is None:
      return gang.code_of([code for _, code in sorted(submitted.results())])
    # The job itself was ended from outside: out of time, preempted, its node lost.
    return engine.STOPPED

  def _executor(self, job: engine.Job) -> Any:
    import submitit

    cluster = self.cluster or ('slurm' if shutil.which('sbatch') else 'local')
    executor = submitit.AutoExecutor(folder=str(job.root / 'logs' / 'slurm'), cluster=cluster)
    options: dict[str, Any] = {
      'name': job.name,
      'timeout_min': self.minutes,
      'gpus_per_node': self.gpus,
      'cpus_per_task': self.cpus,
      'nodes': 1 if cluster == 'local' else self._nodes(job),
      'tasks_per_node': job.processes if cluster == 'local' else self._tasks(job),
    }
    if self.partition:
      options['slurm_partition'] = self.partition
    if self.memory_gb:
      options['mem_gb'] = self.memory_gb
    if self.parameters:
      pairs = {k: v for k, _, v in (p.partition('=') for p in self.parameters)}
      options['slurm_additional_parameters'] = pairs
    executor.update_parameters(**options)
    return executor

  def _tasks(self, job: engine.Job) -> int:
    return min(self.tasks_per_node, job.processes)

  def _nodes(self, job: engine.Job) -> int:
    nodes, rest = divmod(job.processes, self._tasks(job))
    if rest:
      raise ValueError(
        f'--processes is {job.processes} and --option=tasks_per_node={self.tasks_per_node}; '
        'expected a multiple of it.'
      )
    return nodes

  def stop(self) -> None:
    """Asks every job to end; SLURM sends SIGTERM first."""
    with self._lock:
      self._stopped.set()
      for submitted in self._running.values():
        submitted.cancel()


def _call(argv: tuple[str, ...], log: str) -> tuple[float, int]:
  """What runs in each task: the command as a process of its own, SIGTERM passed on.

  Returns:
    When it ended, and its exit code.
  """
  import signal

  with open(log, 'ab') as file:
    process = subprocess.Popen(
      [sys.executable, '-m', 'peftlab', *argv],
      env=gang.environment(_place()),
      stdout=file,
      stderr=subprocess.STDOUT,
    )
    for number in (signal.SIGTERM, signal.SIGUSR2):
      signal.signal(number, lambda *_: os.kill(process.pid, signal.SIGTERM))
    code = process.wait()
    return time.time(), code


def _place() -> joining.Place | None:
  """Where this task stands among those of its job; None for one alone."""
  import submitit

  here = submitit.JobEnvironment()
  if here.num_tasks == 1:
    return None
  # A port that all tasks find, and other jobs hardly have.
  port = 32768 + zlib.crc32(here.job_id.encode()) % 16384
  host = here.hostnames[0] if here.num_nodes > 1 else '127.0.0.1'
  return joining.Place(coordinator=f'{host}:{port}', count=here.num_tasks, id=here.global_rank)

"""The engine `ray`: the processes of a job on the hosts of a Ray cluster, also on TPU slices."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from peftlab.sweep.engines import engine, gang

_LOOK = 10.0  # seconds between looks at hosts that are waited for
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


@engine.engines.register('ray')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray(engine.Engine):
  """Ray Core (the extra `ray`); --jobs caps how many jobs wait or run.

  Each process of a job has a host of its own and is a child of an actor there: one process has the
  chips of a host, and Ray starts no trial again by itself. A host that is lost takes the job with
  it, which then goes on from its checkpoint elsewhere. All hosts see the same folders.

  Attributes:
    address: of the cluster; '': $RAY_ADDRESS, or else one that is started here.
    program: what stands for the word peftlab; '': the launcher's Python with -m peftlab.
    cpus: of a process.
    gpus: of a process.
    resources: others of a process, 'big_memory=1'.
    topology: of a TPU slice that a job has for itself, 'v6e:2x4'; each host runs one process.
    chips: of a host of that slice.
    every: seconds between looks at a process.
  """

  address: str = ''
  program: str = ''
  cpus: float = 1.0
  gpus: float = 0.0
  resources: tuple[str, ...] = ()
  topology: str = ''
  chips: int = 4
  every: float = 0.5
  _running: dict[str, list[Any]] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )
  _lock: threading.Lock = dataclasses.field(
    default_factory=threading.Lock, init=False, repr=False, compare=False
  )
  _stopped: threading.Event = dataclasses.field(
    default_factory=threading.Event, init=False, repr=False, compare=False
  )

  def __post_init__(self):
    if importlib.util.find_spec('ray') is None:
      raise ValueError("The engine ray needs Ray: pip install 'peftlab[ray]'.")
    if self.topology and ':' not in self.topology:
      raise ValueError(f'Option topology of engine ray is {self.topology!r}; expected v6e:2x4.')
    self._wanted()

  def _wanted(self) -> dict[str, float]:
    """The resources of a process besides CPUs."""
    found = {'GPU': self.gpus} if self.gpus else {}
    for item in self.resources:
      name, _, amount = item.partition('=')
      try:
        found[name] = float(amount)
      except ValueError as error:
        raise ValueError(
          f'Option resources of engine ray has {item!r}; expected NAME=AMOUNT.'
        ) from error
    return found

  def run(self, job: engine.Job) -> int:
    """Waits for hosts, starts the processes of a job on them and waits for their end.

    Raises:
      ValueError: the cluster is this machine, or the slice has another number of hosts.
    """
    import ray

    self._connect(job)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    reserved = self._reserve(job)
    if reserved is None:
      return engine.STOPPED
    give_back, group = reserved
    hosts: list[Any] = []
    try:
      while not group.wait(_LOOK):
        if self._stopped.is_set():
          return engine.STOPPED
        _note(job, f'waits for {job.processes} hosts')
      hosts = self._start(job, group)
      return self._wait(job, hosts)
    except ray.exceptions.RayError as error:  # a host was lost before its process had begun
      _note(job, f'a host was lost: {type(error).__name__}')
      return 137
    finally:
      with self._lock:
        self._running.pop(job.name, None)
      for host in hosts:
        ray.kill(host)
      give_back()

  def _connect(self, job: engine.Job) -> None:
    import ray

    address = self.address or os.environ.get('RAY_ADDRESS')
    if address is None and job.processes > 1:
      raise ValueError(
        f'The engine ray has no cluster but this machine, and --processes {job.processes} needs as '
        'many hosts; expected --option=address=HOST:PORT or $RAY_ADDRESS.'
      )
    with self._lock:
      if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)

  def _reserve(self, job: engine.Job) -> tuple[Any, Any] | None:
    """(what gives the hosts back, their placement group: a bundle per process); None: stopped."""
    from ray.util import placement_group, remove_placement_group

    own = {'CPU': self.cpus, **self._wanted()}
    if self.topology:
      return self._reserve_slice(job, own)
    group = placement_group([own] * job.processes, strategy='STRICT_SPREAD')
    return lambda: remove_placement_group(group), group

  def _reserve_slice(self, job: engine.Job, own: dict[str, float]) -> tuple[Any, Any] | None:
    from ray.util import tpu

    version, _, shape = self.topology.partition(':')
    while not self._stopped.is_set():
      try:
        handle = tpu.slice_placement_group(
          topology=shape,
          accelerator_version=version,
          chips_per_vm=self.chips,
          resources_per_bundle={**own, 'TPU': float(self.chips)},
          strategy='STRICT_SPREAD',
          head_reservation_timeout_s=_LOOK,
        )
      except ValueError as error:
        raise ValueError(
          f'Option topology of engine ray is {self.topology!r}, chips {self.chips}: {error}'
        ) from error
      except TimeoutError:
        _note(job, f'waits for a slice {self.topology}')
        continue
      if handle.num_hosts == job.processes:
        return handle.shutdown, handle.placement_group
      handle.shutdown()
      raise ValueError(
        f'A slice {self.topology} of {self.chips} chips a host has {handle.num_hosts} hosts; '
        f'expected --processes={handle.num_hosts}, not {job.processes}.'
      )
    return None

  def _start(self, job: engine.Job, group: Any) -> list[Any]:
    """An actor per process, each on its host, with the process begun."""
    import ray
    from ray.util import scheduling_strategies as strategies

    actor = ray.remote(_Host)
    hosts = []
    for bundle in range(job.processes):
      where = strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
      )
      options = {'num_cpus': self.cpus, 'num_gpus': self.gpus, 'scheduling_strategy': where}
      hosts.append(actor.options(max_restarts=0, **options).remote())
    coordinator = ray.get(hosts[0].address.remote()) if job.processes > 1 else ''
    argv = [*(shlex.split(self.program) or [sys.executable, '-m', 'peftlab']), *job.argv]
    with self._lock:
      if self._stopped.is_set():
        return hosts
      begun = [
        host.start.remote(argv, place.environment() if place else {}, str(job.log), os.getcwd())
        for host, place in zip(hosts, gang.places(job.processes, coordinator), strict=True)
      ]
      self._running[job.name] = hosts
    ray.get(begun)
    return hosts

  def _wait(self, job: engine.Job, hosts: list[Any]) -> int:
    """Waits until every process has ended, or its host is lost; see `gang` for the exit code."""
    codes: list[int] = []
    left, last = dict(enumerate(hosts)), float('inf')
    while left and time.monotonic() < last:
      for number, code in _ended(job, left):
        del left[number]
        codes.append(code)
        given = gang.grace(gang.code_of(codes))
        last = min(last, float('inf') if given is None else time.monotonic() + given)
      time.sleep(self.every if left else 0)
    return gang.code_of(codes) if codes else engine.STOPPED

  def stop(self) -> None:
    """Asks every process to save and end."""
    with self._lock:
      self._stopped.set()
      for hosts in self._running.values():
        for host in hosts:
          host.stop.remote()


def _ended(job: engine.Job, hosts: dict[int, Any]) -> list[tuple[int, int]]:
  """(number, exit code) of the processes that have ended; those of lost hosts first."""
  import ray

  found = []
  for number, host in hosts.items():
    try:
      code = ray.get(host.code.remote())
    except ray.exceptions.RayActorError:
      _note(job, f'the host of process {number} was lost')
      return [(number, 137)]
    if code is not None:
      found.append((number, code))
  return found


def _note(job: engine.Job, line: str) -> None:
  with job.log.open('a', encoding='utf-8') as log:
    log.write(f'peftlab: {line}\n')


class _Host:
  """An actor: one process on the host where the actor is."""

  def __init__(self) -> None:
    self._process: subprocess.Popen | None = None

  def address(self) -> str:
    """HOST:PORT where the first process can listen."""
    import ray

    return f'{ray.util.get_node_ip_address()}:{gang.free_port()}'

  def start(self, argv: list[str], place: dict[str, str], log: str, folder: str) -> None:
    """Starts the process; it dies with the actor."""
    there = pathlib.Path(folder)
    with open(log, 'ab') as file:
      self._process = subprocess.Popen(
        argv,
        env=gang.environment(None) | place,
        cwd=there if there.is_dir() else None,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 (one system call, which takes no lock)
      )

  def code(self) -> int | None:
    """Its exit code, None while it runs."""
    return engine.STOPPED if self._process is None else self._process.poll()

  def stop(self) -> None:
    """SIGTERM to it."""
    if self._process is not None:
      self._process.terminate()


def _die_with_parent() -> None:
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)

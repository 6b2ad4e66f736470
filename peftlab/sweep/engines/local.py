"""The engine `local`: processes on this machine."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import threading
from typing import IO

from peftlab.sweep.engines import engine, gang


@engine.engines.register('local')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(engine.Engine):
  """The processes of a job, usually one, in sessions of their own: see `gang.Gang`.

  Attributes:
    program: what stands for the word peftlab; '': this Python with -m peftlab.
  """

  program: str = ''

  _running: dict[int, gang.Gang] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )
  _lock: threading.Lock = dataclasses.field(
    default_factory=threading.Lock, init=False, repr=False, compare=False
  )
  _stopped: threading.Event = dataclasses.field(
    default_factory=threading.Event, init=False, repr=False, compare=False
  )

  def run(self, job: engine.Job) -> int:
    """Starts the processes of a job and waits for their end."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open('ab') as log:
      started = self._start(job, log)
      if started is None:
        return engine.STOPPED
      try:
        return started.wait()
      finally:
        with self._lock:
          self._running.pop(id(started))

  def _start(self, job: engine.Job, log: IO[bytes]) -> gang.Gang | None:
    with self._lock:
      if self._stopped.is_set():
        return None
      started = gang.Gang([*self._program(), *job.argv], count=job.processes, log=log)
      self._running[id(started)] = started
      return started

  def _program(self) -> list[str]:
    return shlex.split(self.program) or [sys.executable, '-m', 'peftlab']

  def stop(self) -> None:
    """SIGTERM to every process that was started here."""
    with self._lock:
      self._stopped.set()
      for started in self._running.values():
        started.terminate()

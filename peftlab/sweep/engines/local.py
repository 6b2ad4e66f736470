"""The engine `local`: processes on this machine."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import threading
from typing import IO

from peftlab.sweep.engines import engine


@engine.engines.register('local')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(engine.Engine):
  """One process per job, in a session of its own: Ctrl-C reaches the launcher alone.

  Attributes:
    program: what stands for the word peftlab; '': this Python with -m peftlab.
  """

  program: str = ''

  _running: dict[int, subprocess.Popen] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )
  _lock: threading.Lock = dataclasses.field(
    default_factory=threading.Lock, init=False, repr=False, compare=False
  )
  _stopped: threading.Event = dataclasses.field(
    default_factory=threading.Event, init=False, repr=False, compare=False
  )

  def run(self, job: engine.Job) -> int:
    """Starts a process and waits for its end."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open('ab') as log:
      process = self._start(job, log)
      if process is None:
        return engine.STOPPED
      try:
        return process.wait()
      finally:
        with self._lock:
          self._running.pop(process.pid)

  def _start(self, job: engine.Job, log: IO[bytes]) -> subprocess.Popen | None:
    with self._lock:
      if self._stopped.is_set():
        return None
      process = subprocess.Popen(
        [*self._program(), *job.argv],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
      self._running[process.pid] = process
      return process

  def _program(self) -> list[str]:
    return shlex.split(self.program) or [sys.executable, '-m', 'peftlab']

  def stop(self) -> None:
    """SIGTERM to every process that was started here."""
    with self._lock:
      self._stopped.set()
      for process in self._running.values():
        process.terminate()

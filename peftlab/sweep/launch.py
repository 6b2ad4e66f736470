"""The launcher: runs the jobs of a sweep that have no row yet, some at a time, until all have."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import pathlib
import signal
import threading
import time
from typing import Any

from peftlab.sweep import rows, watch
from peftlab.sweep.engines import engine as engines

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How jobs are launched.

  Attributes:
    jobs: how many run at once.
    retries: how often a job that died, or was stopped from outside, is started again.
    every: seconds between the lines that show what runs, and 4 more per line.
  """

  jobs: int = 1
  retries: int = 5
  every: float = 15.0


def waiting(job: engines.Job) -> list[str]:
  """The trials of a job that have no row."""
  return [name for name in job.ids if rows.read(job.root / name) is None]


def launch(
  jobs: Sequence[engines.Job],
  engine: engines.Engine,
  *,
  split: Callable[[engines.Job], Sequence[engines.Job]] = lambda job: (),
  labels: dict[str, str] | None = None,
  options: Options = Options(),
  say: Say = print,
) -> bool:
  """Runs every job that has a trial without a row. Rows, not exit codes, say what is done.

  A job that was killed, or saved and stopped, is started again and goes on from its checkpoints.
  SIGTERM and Ctrl-C stop the launcher: its processes save, and the same command continues.

  Args:
    jobs: of one root.
    engine: runs them.
    split: the jobs to fall back on where one ended and left trials without a row: of a pack, each
      of its trials for itself.
    labels: {id: what a person sees of it}.
    options: see there.
    say: takes lines for a person.

  Returns:
    Whether it came to the end; False where it was stopped.
  """
  run = _Launch(engine, split, options, say)
  with _signals(run.stop), futures.ThreadPoolExecutor(options.jobs) as pool:
    pending = {pool.submit(run.job, job) for job in jobs if waiting(job)}
    shown = watch.Watch(labels or {}, say=say)
    said = time.monotonic()
    while pending:
      done, pending = futures.wait(pending, 0.2, return_when=futures.FIRST_COMPLETED)
      for future in done:
        more = () if future.cancelled() else future.result()
        pending |= {pool.submit(run.job, job) for job in more}
      if run.stopped.is_set():
        for future in pending:
          future.cancel()
      if time.monotonic() - said >= options.every:
        said = time.monotonic() + 4.0 * shown.show(run.running())  # many lines come less often
  return not run.stopped.is_set()


class _Launch:
  """What the threads of a launcher share."""

  def __init__(
    self,
    engine: engines.Engine,
    split: Callable[[engines.Job], Sequence[engines.Job]],
    options: Options,
    say: Say,
  ):
    self.stopped = threading.Event()
    self._engine, self._split, self._options, self._say = engine, split, options, say
    self._running: dict[str, engines.Job] = {}

  def stop(self) -> None:
    """Nothing is started any more; what runs is told to save and end."""
    self.stopped.set()
    self._engine.stop()

  def running(self) -> list[pathlib.Path]:
    """The folders of the trials that run now."""
    jobs = list(self._running.values())
    return [job.root / name for job in jobs for name in waiting(job)]

  def job(self, job: engines.Job) -> Sequence[engines.Job]:
    """Runs a job until its trials have rows, or it will not go on; gives what to run instead."""
    for attempt in range(self._options.retries + 1):
      if self.stopped.is_set() or not waiting(job):
        return ()
      self._running[job.name] = job
      code = self._engine.run(job)
      del self._running[job.name]
      left = waiting(job)
      self._tell(job, left)
      if not left or self.stopped.is_set():
        return ()
      if not engines.starts_again(code):
        return self._give_up(job, f'ended with {code}')
      self._say(f'{job.name}: ended with {code} (start {attempt + 1}); goes on from what is saved')
    return self._give_up(job, f'was started {self._options.retries + 1} times')

  def _tell(self, job: engines.Job, left: Sequence[str]) -> None:
    for name in job.ids:
      row = None if name in left else rows.read(job.root / name)
      if row is not None:
        self._say(f'{name}: {watch.result(row)}')

  def _give_up(self, job: engines.Job, why: str) -> Sequence[engines.Job]:
    self._say(f'{job.name}: {why} and left trials without a row. Its log ends:\n{_tail(job.log)}')
    instead = [one for one in self._split(job) if waiting(one)]
    if instead:
      self._say(f'{job.name}: its {len(instead)} trials run one by one instead')
    return instead


def _tail(log: pathlib.Path, lines: int = 5) -> str:
  if not log.exists():
    return '  (no log)'
  text = log.read_text(encoding='utf-8', errors='replace').splitlines()
  return '\n'.join(f'  {line}' for line in text[-lines:]) or '  (empty)'


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Generator[None]:
  """Within the block SIGTERM and SIGINT call `stop`; a second SIGINT interrupts as ever."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def handle(number: int, frame: Any) -> None:
    del number, frame
    signal.signal(signal.SIGINT, before[signal.SIGINT])
    # In a thread: the engine's lock may be held by the very code that was interrupted.
    threading.Thread(target=stop).start()

  before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield
  finally:
    for number, old in before.items():
      signal.signal(number, old)

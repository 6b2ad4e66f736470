"""The loop: runs trained in turn on one base, until done, diverged, or told to stop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
import contextlib
import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from peftlab.train.progress import Progress
from peftlab.train.run import Run

# What a process exits with. 42 tells a scheduler to start the same command again.
EXIT_CODES = {'ok': 0, 'diverged': 1, 'preempted': 42}


class Flag:
  """Set when the process is asked to stop.

  Attributes:
    is_set: whether it was.
    interrupted: whether by Ctrl-C.
  """

  def __init__(self) -> None:
    self.is_set = self.interrupted = False
    self._steps = 0

  def look(self) -> None:
    """Asks the other processes, where there may be some: all stop at the same step, or none."""
    self._steps += 1
    if jax.distributed.is_initialized() and not self.is_set:
      self.is_set = multihost_utils.reached_preemption_sync_point(self._steps)


@contextlib.contextmanager
def preemption() -> Generator[Flag]:
  """Within the block SIGTERM and Ctrl-C set a flag; a second Ctrl-C ends the process at once.

  Where the process has joined others, SIGTERM is left to JAX's preemption service: whoever of them
  gets one, all stop at the same step (`Flag.look`). Ctrl-C is then passed on as a SIGTERM.

  Raises:
    KeyboardInterrupt: at the end of the block, after a Ctrl-C.
  """
  flag = Flag()
  if threading.current_thread() is not threading.main_thread():
    yield flag
    return

  def stop(number: int, frame: Any) -> None:
    del frame
    if number == signal.SIGINT:
      if flag.interrupted:
        raise KeyboardInterrupt
      os.write(2, b'\npeftlab: saving; Ctrl-C again ends at once\n')
      flag.interrupted = True
    if joined:
      os.kill(os.getpid(), signal.SIGTERM)
    else:
      flag.is_set = True

  joined = jax.distributed.is_initialized()
  numbers = (signal.SIGINT,) if joined else (signal.SIGTERM, signal.SIGINT)
  before = {number: signal.signal(number, stop) for number in numbers}
  try:
    yield flag
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  if flag.interrupted:
    raise KeyboardInterrupt


def train(runs: Sequence[Run], *, say: Callable[[str], None] = print) -> Progress:
  """Trains some runs to their end, one update each in turn.

  A run that diverges ends; the others go on. SIGTERM saves all of them and ends the loop.

  Returns:
    The progress as it ended, with the rate in tokens per second.

  Raises:
    KeyboardInterrupt: Ctrl-C; all runs are saved, unless it came twice.
  """
  with preemption() as stop:
    for run in runs:
      if not stop.is_set:
        run.begin()
    total = sum(run.experiment.train.steps for run in runs)
    progress = Progress(total, done=sum(run.step for run in runs), say=say)
    while not stop.is_set and not all(run.done for run in runs):
      for run in runs:
        if not run.done and not stop.is_set:
          _report(progress, run, run.update())
          stop.look()
    for run in runs:
      _report(progress, run, run.settle())
    progress.close()
    for run in runs:
      run.finish(preempted=stop.is_set)
  return progress


def _report(progress: Progress, run: Run, ended: list[float]) -> None:
  data = run.experiment.data
  for loss in ended:
    progress.update(run.experiment.name, loss=loss, tokens=data.batch * data.length)

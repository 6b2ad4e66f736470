"""Several processes of one trial: where each stands, how they end together, with one exit code."""

from __future__ import annotations

from collections.abc import Sequence
import os
import queue
import socket
import subprocess
import threading
from typing import IO

from peftlab.sweep.engines import engine
from peftlab.train import joining

# Seconds for the others once one has ended badly: those that stop together are saving; those that
# have lost one can only wait, or are about to say the same.
SAVING, LOST = 120.0, 5.0


def grace(code: int) -> float | None:
  """Seconds that the other processes of a gang are given after one ended with `code`."""
  return None if code == 0 else SAVING if code == engine.STOPPED else LOST


def code_of(codes: Sequence[int]) -> int:
  """The exit code of a gang, from those of its processes in the order in which they ended.

  The first that is not 0 is the cause; what the others end with is what they made of it.
  """
  return next((code for code in codes if code), 0)


def places(count: int, coordinator: str) -> list[joining.Place | None]:
  """Where each of `count` processes stands; None for one alone."""
  if count == 1:
    return [None]
  return [joining.Place(coordinator=coordinator, count=count, id=i) for i in range(count)]


def environment(place: joining.Place | None) -> dict[str, str]:
  """The environment of a process at a place: that of this one, without a place of its own."""
  without = {k: v for k, v in os.environ.items() if k not in joining.VARIABLES}
  return without | (place.environment() if place else {})


def free_port() -> int:
  """A port of this machine that nobody has."""
  with socket.socket() as found:
    found.bind(('', 0))
    return found.getsockname()[1]


class Gang:
  """The processes of a job on this machine, each in a session of its own.

  Ctrl-C reaches the launcher alone. One that ends badly takes the others with it, since they would
  wait for it.
  """

  def __init__(self, argv: Sequence[str], *, count: int, log: IO[bytes]):
    """Starts them.

    Args:
      argv: the command line of each.
      count: of processes.
      log: takes their output.
    """
    coordinator = f'127.0.0.1:{free_port()}' if count > 1 else ''
    self.processes = [
      subprocess.Popen(
        list(argv),
        env=environment(place),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
      for place in places(count, coordinator)
    ]

  def wait(self) -> int:
    """Waits for the end of all, and gives their exit code."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    for process in self.processes:
      threading.Thread(target=lambda p=process: ended.put(p.wait()), daemon=True).start()
    codes: list[int] = []
    while len(codes) < len(self.processes):
      try:
        codes.append(ended.get(timeout=grace(code_of(codes))))
      except queue.Empty:
        self.kill()
        codes.append(ended.get())
    return code_of(codes)

  def terminate(self) -> None:
    """Asks all of them to save and end."""
    for process in self.processes:
      process.terminate()

  def kill(self) -> None:
    """Ends all of them."""
    for process in self.processes:
      process.kill()

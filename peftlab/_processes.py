"""Several processes of one run, by jax.distributed: who writes, and what all of them agree on.

Every process runs the same program on the devices of all. What is the same everywhere (a loss, a
config) is decided by each for itself; files are written by the first process alone; what only one
of them can know (a file that is there, an error) is told to all before any goes on. With a single
process each of these is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
import contextlib
import itertools
import json
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

_DAY = 24 * 3600 * 1000  # milliseconds: a trial's lock may be held for long
_ERROR = 1024  # bytes of a message
_NUMBERS = itertools.count()  # of barriers: all processes count alike


def count() -> int:
  """How many processes run this program together."""
  return jax.process_count()


def is_first() -> bool:
  """Whether this is the process that writes."""
  return jax.process_index() == 0


def host(array: jax.Array | np.ndarray) -> np.ndarray:
  """The whole of an array; where parts of it lie with other processes, all have to call."""
  if isinstance(array, jax.Array) and not array.is_fully_addressable:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
  return np.asarray(array)


def put(array: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
  """An array where a sharding says; what is only here is taken to be the same in all processes."""
  if sharding.is_fully_addressable:
    return jax.device_put(array, sharding)
  if isinstance(array, jax.Array):
    if not array.is_fully_addressable:
      return jax.device_put(array, sharding)
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
      data = put(jax.random.key_data(array), sharding)
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
  whole = np.asarray(array)
  return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def wait() -> None:
  """Waits until every process is here."""
  from orbax.checkpoint import multihost  # it takes time, and a single process needs none of it

  key = f'peftlab-{next(_NUMBERS)}'
  multihost.get_barrier_sync_fn()(key=key, timeout_ms=_DAY)


def told(text: str) -> str:
  """The text of the first process, in all of them."""
  if count() == 1:
    return text
  wait()  # the others may be far ahead, and a broadcast does not wait for long
  content = text.encode() if is_first() else b''
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
  room = np.zeros(max(256, 1 << (size - 1).bit_length() if size else 0), np.uint8)
  room[: len(content)] = np.frombuffer(content, np.uint8)
  return bytes(multihost_utils.broadcast_one_to_all(room)[:size]).decode()


def agree(error: str) -> None:
  """Goes on where no process has an error to tell.

  Raises:
    ValueError: the first that one of them tells, in all of them.
  """
  if count() == 1:
    found = [error]
  else:
    wait()
    content = error.encode()[:_ERROR].ljust(_ERROR)
    rows = multihost_utils.process_allgather(np.frombuffer(content, np.uint8))
    found = [bytes(row).decode(errors='ignore').rstrip() for row in rows]
  for told_error in filter(None, found):
    raise ValueError(told_error)


def by_first[T](work: Callable[[], T]) -> T:
  """What `work` gives in the first process, which alone runs it; for JSON.

  Raises:
    ValueError: in all of them, where it does in the first.
  """
  if count() == 1:
    return work()
  answer: dict[str, Any] = {}
  if is_first():
    try:
      answer = {'found': work()}
    except (ValueError, OSError) as error:
      answer = {'error': str(error)}
  answer = json.loads(told(json.dumps(answer)))
  if 'error' in answer:
    raise ValueError(answer['error'])
  return answer['found']


@contextlib.contextmanager
def entered(context: contextlib.AbstractContextManager) -> Generator[None]:
  """A block in a context that the first process enters and leaves, for all of them."""
  with contextlib.ExitStack() as stack:

    def enter() -> None:
      stack.enter_context(context)

    by_first(enter)
    yield


def check_shared(read: Callable[[], str], written: str, *, subject: str) -> None:
  """Checks that all processes see what the first has written, within ten seconds.

  Raises:
    ValueError: one of them does not, in all of them.
  """
  expected, last = told(written), time.monotonic() + 10.0
  seen = read()
  while seen != expected and time.monotonic() < last:
    time.sleep(0.1)
    seen = read()
  number = jax.process_index()
  agree(
    ''
    if seen == expected
    else f'{subject} is not one folder for all {count()} processes: process {number} does not see '
    'what process 0 wrote there. Expected a folder on a disk that all of them share.'
  )

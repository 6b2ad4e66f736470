"""How a process joins the others of its run: flags, the environment, what JAX finds by itself."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import socket
import time
from typing import Any

import jax

from peftlab import _processes

COORDINATOR, COUNT, ID = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
VARIABLES = (COORDINATOR, COUNT, ID)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where a process stands among the processes of a run.

  Attributes:
    coordinator: HOST:PORT, where process 0 listens.
    count: of processes.
    id: of this one, from 0 on.
  """

  coordinator: str
  count: int
  id: int

  def environment(self) -> dict[str, str]:
    """What tells a process its place."""
    return {COORDINATOR: self.coordinator, COUNT: str(self.count), ID: str(self.id)}


def place(
  environment: Mapping[str, str],
  *,
  coordinator: str = '',
  count: int | None = None,
  number: int | None = None,
  found: bool = False,
) -> Place | None:
  """The place that flags tell, or else the environment; None where neither tells one.

  Args:
    environment: of the process: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID.
    coordinator: the flag.
    count: the flag.
    number: the flag, the process id.
    found: the flag --distributed: JAX finds the place, and the environment is its matter.

  Raises:
    ValueError: only a part of it is told, or it is no place.
  """
  if found:
    if coordinator or count is not None or number is not None:
      raise ValueError(
        '--distributed lets JAX find the place of the process; expected that, or --coordinator, '
        '--num_processes and --process_id, not both.'
      )
    return None
  given: dict[str, Any] = {
    'coordinator': coordinator or environment.get(COORDINATOR, ''),
    'num_processes': environment.get(COUNT) if count is None else count,
    'process_id': environment.get(ID) if number is None else number,
  }
  missing = [name for name, value in given.items() if value is None or value == '']
  if len(missing) == len(given):
    return None
  if missing:
    told = ', '.join(f'--{name}' for name in given if name not in missing)
    raise ValueError(
      f'{told} without --{" and --".join(missing)}: of several processes each is told all three '
      f'(or {COORDINATOR}, {COUNT}, {ID}); --distributed lets JAX find them.'
    )
  host, _, port = given['coordinator'].rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise ValueError(f'--coordinator is {given["coordinator"]!r}; expected HOST:PORT.')
  processes, own = (_whole(name, given[name]) for name in ('num_processes', 'process_id'))
  if not 0 <= own < processes:
    raise ValueError(
      f'--process_id is {own} and --num_processes {processes}; expected an id from 0 to '
      f'{max(processes - 1, 0)}.'
    )
  return Place(coordinator=given['coordinator'], count=processes, id=own)


def _whole(name: str, value: Any) -> int:
  try:
    return int(value)
  except ValueError as error:
    raise ValueError(f'--{name} is {value!r}; expected a whole number.') from error


def join(found: Place | None, *, timeout: int = 300) -> None:
  """Joins the other processes; to be called before JAX touches a device.

  Args:
    found: the place; None: JAX finds it, on a TPU pod, under SLURM, MPI, on GKE.
    timeout: seconds to wait for the others.

  Raises:
    ValueError: they do not come, or JAX finds no place.
  """
  options: dict[str, Any] = {'initialization_timeout': timeout}
  if found is not None:
    if found.id:
      _reach(found, timeout)
    options |= {
      'coordinator_address': found.coordinator,
      'num_processes': found.count,
      'process_id': found.id,
      'cluster_detection_method': 'deactivate',
    }
  try:
    jax.distributed.initialize(**options)
  except jax.errors.JaxRuntimeError as error:
    told = ' '.join(str(error).split())
    where = f' of {found.count} at {found.coordinator} (process {found.id})' if found else ''
    raise ValueError(
      f'Not all processes{where} were there within {timeout} s (--join_timeout): {told[:200]}'
    ) from error
  except ValueError as error:
    if found is not None:
      raise
    raise ValueError(
      f'--distributed: JAX finds no other processes here ({error}). Expected a TPU pod, SLURM, MPI '
      'or GKE; elsewhere give --coordinator, --num_processes and --process_id.'
    ) from error


def _reach(found: Place, timeout: int) -> None:
  """Waits until the coordinator listens."""
  host, _, port = found.coordinator.rpartition(':')
  last = time.monotonic() + timeout
  while True:
    try:
      socket.create_connection((host.strip('[]'), int(port)), timeout=5.0).close()
      return
    except OSError as error:
      if time.monotonic() >= last:
        raise ValueError(
          f'Process {found.id} of {found.count} finds no coordinator at {found.coordinator} within '
          f'{timeout} s (--join_timeout): {error.strerror or error}. Expected process 0 of the run '
          'to listen there.'
        ) from error
      time.sleep(min(0.2, timeout / 10))


def check_same(config: str) -> None:
  """Checks that all processes make the same run.

  Args:
    config: all that decides it, as text with a line per field.

  Raises:
    ValueError: a process has another config than the first: in all of them, with the lines.
  """
  expected = _processes.told(config)
  lines = zip(expected.splitlines(), config.splitlines(), strict=False)
  differ = [f'{_word(a)} there, {_word(b)} here' for a, b in lines if a != b]
  number = jax.process_index()
  error = (
    f'Process {number} has another config than process 0: {"; ".join(differ[:3]) or "longer"}.'
  )
  _processes.agree(error if config != expected else '')


def _word(line: str) -> str:
  return line.strip().rstrip(',')


def of_another(error: BaseException) -> bool:
  """Whether an error may come from another process that has ended, rather than from this one."""
  alone = not jax.distributed.is_initialized() or _processes.count() == 1
  if alone or not isinstance(error, jax.errors.JaxRuntimeError):
    return False
  return not str(error).startswith('RESOURCE_EXHAUSTED')

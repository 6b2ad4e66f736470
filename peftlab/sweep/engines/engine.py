"""What an engine is: it runs a command line somewhere, and says how it ended."""

from __future__ import annotations

import abc
from collections.abc import Sequence
import dataclasses
import pathlib
import shlex
import typing
from typing import Any, ClassVar

from peftlab import _registry
from peftlab.train import fields

engines = _registry.Registry(
  'engine', package='peftlab.sweep.engines', entry_points='peftlab.engines'
)

# What a job ends with that saved and stopped because it was told to.
STOPPED = 42
# Exit codes after which the same command goes on where it stopped: saved and told to stop; then
# abort, killed, segmentation fault, terminated, each as a shell or a container reports it.
AGAIN = (STOPPED, 134, 137, 139, 143)


def starts_again(code: int) -> bool:
  """Whether a command that ended with `code` is to be started again."""
  return code < 0 or code in AGAIN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One command line to run.

  Attributes:
    name: letters, digits and '-'; unique in a sweep.
    ids: of the trials it makes: one, or those of a pack.
    argv: what follows the word peftlab.
    root: of the sweep.
    processes: that run it together, by jax.distributed; each has the same command line.
  """

  name: str
  ids: tuple[str, ...]
  argv: tuple[str, ...]
  root: pathlib.Path
  processes: int = 1

  @property
  def log(self) -> pathlib.Path:
    """Where the output of its processes goes."""
    return self.root / 'logs' / f'{self.name}.txt'

  @property
  def line(self) -> str:
    """The command line for a person or a shell."""
    return shlex.join(['peftlab', *self.argv])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(abc.ABC):
  """An engine: a frozen dataclass whose fields are its options.

  Attributes:
    starts: whether it starts anything; if not, `render` is all it does.
  """

  starts: ClassVar[bool] = True

  def render(self, job: Job) -> str:
    """What a person can look at, or give to another tool: the command line."""
    return job.line

  @abc.abstractmethod
  def run(self, job: Job) -> int:
    """Runs a job to its end and returns its exit code; called from several threads at once."""

  @abc.abstractmethod
  def stop(self) -> None:
    """Asks everything that it runs to save and end."""


def make(name: str, options: Sequence[str] = ()) -> Engine:
  """The engine of a name, with options as 'KEY=VALUE'.

  Raises:
    ValueError: no such engine or option, or a value of the wrong type.
  """
  cls = engines.get(name)
  found: dict[str, Any] = {}
  known = [field.name for field in dataclasses.fields(cls) if field.init]
  for option in options:
    key, equals, value = option.partition('=')
    if key not in known or not equals:
      near = _registry.did_you_mean(key, known)
      choices = ', '.join(known) or 'none'
      raise ValueError(f'Engine {name} has no option {option!r}{near or "."} Options: {choices}.')
    found[key] = _read(f'Option {key} of engine {name}', value, fields.kinds(cls)[key])
  return cls(**found)


def _read(subject: str, text: str, kind: Any) -> Any:
  if typing.get_origin(kind) is tuple:
    return tuple(item for item in text.split(',') if item)
  if kind is str:
    return text
  try:
    return kind(text)
  except ValueError as error:
    raise ValueError(f'{subject} is {text!r}; expected {fields.describe(kind)}.') from error

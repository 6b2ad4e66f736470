"""From trials to jobs: which trials run together in a pack, which alone, and with what command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import os
import pathlib

from peftlab.sweep import packing, rows
from peftlab.sweep.engines.engine import Job
from peftlab.sweep.trials import Trial, command
from peftlab.train.config import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """What the command lines of a sweep have in common.

  Attributes:
    source: of the experiment, as --config takes it.
    base: what that gives without flags.
    root: of the sweep.
    second: a corpus for forgetting, or ''.
    processes: of each trial.
    plugins: files of adapter types.
  """

  source: str
  base: Experiment
  root: str
  second: str = ''
  processes: int = 1
  plugins: tuple[str, ...] = ()

  @property
  def more(self) -> list[str]:
    """Flags of every command."""
    plugins = [f'--plugin={file}' for file in self.plugins]
    return [*plugins, *([f'--second={self.second}'] if self.second else [])]

  def command(self, trial: Trial) -> list[str]:
    """The command line of a trial that runs alone."""
    return command(trial, source=self.source, base=self.base, root=self.root, more=self.more)

  def alone(self, trial: Trial) -> Job:
    """The job of a trial that runs alone."""
    argv = tuple(self.command(trial))
    ids, root = (trial.id,), pathlib.Path(self.root)
    return Job(name=trial.id, ids=ids, argv=argv, root=root, processes=self.processes)

  def pack(self, trials: Sequence[Trial], size: int) -> Job:
    """The job of some trials that run as one program, `size` at a time; 0: as many as fit."""
    ids = tuple(trial.id for trial in trials)
    digest = hashlib.sha256(','.join(ids).encode()).hexdigest()[:12]
    argv = (
      'pack',
      f'--config={self.source}',
      f'--root={self.root}',
      f'--trials={",".join(ids)}',
      f'--size={size}',
      *self.more,
    )
    return Job(name=f'p{digest}', ids=ids, argv=argv, root=pathlib.Path(self.root))


def plan(
  trials: Iterable[Trial], setup: Setup, *, pack: str, say: Callable[[str], None] = print
) -> list[Job]:
  """The jobs of the trials that have no row.

  Args:
    trials: of the sweep.
    setup: of their commands.
    pack: 'off', 'auto' (each group is one pack, as big as memory allows), or the size of packs.
    say: takes a line on each trial that does not pack, with the reason, and on packs that are not
      in float32.

  Raises:
    ValueError: see `pack_size`.
  """
  size = pack_size(pack, processes=setup.processes)
  left = [t for t in trials if rows.read(os.path.join(setup.root, t.id)) is None]
  if size is None:
    return [setup.alone(trial) for trial in left]
  groups, alone = packing.groups(left)
  for trial, why in alone:
    say(f'{trial.id} {trial.label}: a process of its own, {why}')
  for line in dict.fromkeys(map(packing.precision, groups)):
    if line:
      say(line)
  jobs = []
  for group in groups:
    parts = [group[i : i + size] for i in range(0, len(group), size)] if size else [group]
    jobs += [setup.pack(part, size) if len(part) > 1 else setup.alone(part[0]) for part in parts]
  return jobs + [setup.alone(trial) for trial, _ in alone]


def pack_size(pack: str, *, processes: int = 1) -> int | None:
  """'off' -> None, 'auto' -> 0, '8' -> 8; a pack is one process: several are never packed.

  Raises:
    ValueError: anything else, or a size although each trial has several processes.
  """
  if pack == 'off' or (pack == 'auto' and processes > 1):
    return None
  if processes > 1:
    raise ValueError(
      f'--pack is {pack!r} and --processes {processes}, but a pack is one process; expected '
      '--pack=off or --processes=1.'
    )
  if pack == 'auto':
    return 0
  if not pack.isdigit() or int(pack) < 1:
    raise ValueError(f'--pack is {pack!r}; expected off, auto, or a number of trials.')
  return int(pack)


def splitter(setup: Setup, trials: Iterable[Trial]) -> Callable[[Job], Sequence[Job]]:
  """What the trials of a pack that did not end well run as: each alone."""
  known: Mapping[str, Trial] = {trial.id: trial for trial in trials}
  return lambda job: [setup.alone(known[i]) for i in job.ids] if len(job.ids) > 1 else ()

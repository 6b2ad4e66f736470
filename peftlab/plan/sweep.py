"""Plans of a sweep: one per program that its trials need, and which trials do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from peftlab.plan import planning, report
from peftlab.plan.planning import Plan
from peftlab.sweep import packing
from peftlab.sweep.trials import Trial
from peftlab.train import page

Say = Callable[[str], None]
_MOST = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """Trials that run as one program, and its plan.

  Attributes:
    trials: those that it trains, `plan.trials` at a time.
    plan: of the program.
    number: of the program; jobs that need the same one have the same number.
  """

  trials: tuple[Trial, ...]
  plan: Plan
  number: int


def plan_sweep(
  trials: Sequence[Trial], topology: str, *, pack: int | None = None, say: Say = print
) -> list[Job]:
  """A plan for every trial; trials that need the same program share it, so it is compiled once.

  Args:
    trials: of the sweep.
    topology: 'v6e:2x4' for example.
    pack: None: each trial alone; 0: each group of trials as one pack as large as fits; else the
      size of packs.
    say: takes a line on each program.

  Raises:
    ValueError: see `planning.plan`, with the trial in front.
  """
  packs, alone = packing.groups(trials) if pack is not None else ([], [(t, '') for t in trials])
  known: dict[Any, tuple[Plan, int]] = {}

  def planned(group: Sequence[Trial], size: int) -> tuple[Plan, int]:
    name = (size, *sorted({program_key(trial) for trial in group}))
    if name not in known:
      known[name] = _plan(group, topology, size), len(known) + 1
      made = known[name][0]
      say(f'program {len(known)}: {made.compile_seconds:.0f} s to compile, for {group[0].label}')
    return known[name]

  jobs: list[Job] = []
  for group in packs:
    jobs += _parts_of(group, pack or 0, planned)
  for trial, _ in alone:
    plan, number = planned([trial], 1)
    jobs.append(Job(trials=(trial,), plan=plan, number=number))
  return jobs


def program_key(trial: Trial) -> tuple:
  """Equal for trials whose steps need the same memory and time."""
  sizes = packing.sizes(trial.experiment.adapter)
  return packing.key(trial.experiment), tuple(sorted(sizes.items()))


def _plan(group: Sequence[Trial], topology: str, size: int) -> Plan:
  experiments = [trial.experiment for trial in group]
  try:
    if size == 1:
      return planning.plan(experiments[0], topology)
    return planning.plan(experiments[0], topology, trials=size, packed=experiments)
  except ValueError as error:
    raise ValueError(f'Trial {group[0].label}: {error}') from error


def _parts_of(
  group: Sequence[Trial],
  size: int,
  planned: Callable[[Sequence[Trial], int], tuple[Plan, int]],
) -> list[Job]:
  if size == 0:
    size = largest(lambda n: planned(group, n)[0], min(len(group), _MOST))
    plan, number = planned(group, size)
    return [Job(trials=tuple(group), plan=plan, number=number)]
  jobs = []
  for start in range(0, len(group), size):
    part = group[start : start + size]
    plan, number = planned(part, len(part))
    jobs.append(Job(trials=tuple(part), plan=plan, number=number))
  return jobs


def largest(plan: Callable[[int], Plan], most: int) -> int:
  """The most trials, up to `most`, whose pack fits; 1 where not even 2 do.

  Memory grows evenly with the trials, so two programs say where the limit is, and a third checks.
  """
  whole = plan(most)
  if whole.fits or most == 1:
    return most
  one = plan(1)
  if not one.fits:
    return 1
  each = max((whole.memory.total - one.memory.total) / (most - 1), 1.0)
  limit = whole.memory.limit or whole.chip.hbm
  size = min(1 + int((limit - one.memory.total) // each), most - 1)
  while size > 1 and not plan(size).fits:
    size -= max(1, size // 8)
  return max(size, 1)


def table(jobs: Sequence[Job]) -> str:
  """A line per trial; what does not fit is marked."""
  rows = [('trial', 'setting', 'program', 'pack', 'memory', 'share', 'trial-step', 'fits')]
  rows += [
    (
      trial.id,
      trial.label,
      str(job.number),
      str(job.plan.trials),
      page.size(job.plan.memory.total),
      report.share(job.plan),
      report.step_time(job.plan, job.plan.trials),
      'yes' if job.plan.fits else 'NO',
    )
    for job in jobs
    for trial in job.trials
  ]
  return report.columns(rows, left=2)

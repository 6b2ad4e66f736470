"""The engine `list`: prints one command line per job, for xpk, SkyPilot, or a loop of one's own."""

from __future__ import annotations

import dataclasses

from peftlab.sweep.engines import engine


@engine.engines.register('list')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing(engine.Engine):
  """Starts nothing."""

  starts = False

  def render(self, job: engine.Job) -> str:
    """The command line; of several processes JAX finds the others where the tool starts them."""
    return job.line if job.processes == 1 else f'{job.line} --distributed'

  def run(self, job: engine.Job) -> int:
    """Raises ValueError: there is nothing to run."""
    raise ValueError(f'The engine list starts nothing, so it cannot run {job.name}.')

  def stop(self) -> None:
    """Nothing runs."""

"""The time of a step: what the compiler's figures come to, and the bound that no program beats."""

from __future__ import annotations

import dataclasses

from peftlab.plan.chips import Chip
from peftlab.plan.costs import Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
  """Seconds that each resource is busy at its peak; the largest bounds the step from below."""

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """The roofline."""
    return max(self.compute, self.memory, self.network)

  @property
  def by(self) -> str:
    """What bounds it: 'matrix units', 'main memory' or 'interconnect'."""
    named = {
      'matrix units': self.compute,
      'main memory': self.memory,
      'interconnect': self.network,
    }
    return max(named, key=lambda name: named[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Time:
  """Seconds of a step.

  Attributes:
    bound: the roofline.
    products: of operations with a matrix product.
    others: of all other operations, at the bandwidth of main memory.
    others_cycles: of the same by the compiler's cycles, which are too many for large arrays.
    network: of collectives that nothing runs beside.
    doubts: why the sum cannot be trusted; empty where it can.
  """

  bound: Bound
  products: float
  others: float
  others_cycles: float
  network: float
  doubts: tuple[str, ...] = ()

  @property
  def seconds(self) -> float | None:
    """The estimate, never below the bound; None where it cannot be trusted."""
    if self.doubts:
      return None
    return max(self.products + self.others + self.network, self.bound.seconds)

  @property
  def most(self) -> float | None:
    """The estimate with the compiler's cycles for all operations; None likewise."""
    if self.seconds is None:
      return None
    return max(self.products + self.others_cycles + self.network, self.seconds)


def time_of(costs: Costs, chip: Chip) -> Time:
  """The time of one step on a chip.

  Matrix products take the compiler's own cycles, or the time that main memory needs for their
  bytes if that is longer. For other operations its cycles are far above what main memory needs (4
  times, for the sum of two large arrays), so they take the time of their bytes. A collective that
  waits takes its bytes through 2 ports: a ring along one dimension, both ways around.

  Args:
    costs: of one run of the program.
    chip: on which it runs.
  """
  bound = Bound(
    compute=costs.flops / chip.peak,
    memory=costs.hbm_bytes / chip.bandwidth,
    network=costs.sent / chip.send,
  )
  waits = sum(m.sent - m.hidden for m in costs.moved)
  return Time(
    bound=bound,
    products=max(costs.cycles / chip.clock, costs.product_bytes / chip.bandwidth),
    others=costs.other_bytes / chip.bandwidth,
    others_cycles=costs.other_cycles / chip.clock,
    network=waits / (2 * chip.link),
    doubts=tuple(_doubts(costs, chip)),
  )


def _doubts(costs: Costs, chip: Chip) -> list[str]:
  found = []
  unknown = [name for name, trips in costs.loops.items() if trips is None]
  if unknown:
    found.append(f'how often {", ".join(unknown)} runs is not in the program')
  if costs.unknown:
    named = ', '.join(f'{count} x {name}' for name, count in sorted(costs.unknown.items()))
    found.append(f'the compiler has no figure for {named}')
  if costs.flops and costs.cycles / chip.clock < 0.98 * costs.flops / chip.peak:
    found.append('the cycles of the matrix products are below what the matrix units can do')
  return found

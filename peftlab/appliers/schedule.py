"""The schedule of a pipeline: which layers each stage holds, and which it runs at which tick."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

RESTS = ('error', 'first', 'last', 'pad')
NO_LAYER = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """Where the layers of a stack are, and when each runs.

  In repeat r, stage s runs `depth` layers, the first `before + (r * stages + s) * depth`. Every
  stage holds equally many places: those of its repeats, then its share of the layers outside.

  Attributes:
    layers: of the stack.
    stages: devices along the mesh axis 'stage'.
    repeats: how often a microbatch goes around the stages.
    depth: layers that a stage runs per microbatch and repeat.
    microbatches: into how many parts the batch is cut.
    before: layers outside of the stages that run before them.
    after: likewise, after them.
  """

  layers: int
  stages: int
  repeats: int
  depth: int
  microbatches: int
  before: int = 0
  after: int = 0

  @property
  def padding(self) -> int:
    """Places in the stages that no layer fills: there x passes unchanged."""
    return self.staged - (self.layers - self.outside)

  @property
  def staged(self) -> int:
    """Places in the stages."""
    return self.stages * self.repeats * self.depth

  @property
  def outside(self) -> int:
    """Layers outside of the stages."""
    return self.before + self.after

  @property
  def held(self) -> int:
    """Places that each stage holds."""
    return self.repeats * self.depth + -(-self.outside // self.stages)

  @property
  def period(self) -> int:
    """Ticks from one repeat of a microbatch to its next."""
    return max(self.microbatches, self.stages)

  @property
  def ticks(self) -> int:
    """Steps of the pipeline, in each of which every stage runs `depth` layers."""
    return (self.repeats - 1) * self.period + self.microbatches + self.stages - 1

  @property
  def bubble(self) -> float:
    """The share of the ticks in which a stage has nothing to do.

    For one repeat (stages - 1) / (microbatches + stages - 1), Huang et al. 2019, arXiv:1811.06965.
    """
    return 1 - self.repeats * self.microbatches / self.ticks

  @property
  def order(self) -> tuple[int, ...]:
    """The number of the layer at each place, stage by stage; NO_LAYER where there is none."""
    end = self.layers - self.after
    places = []
    for stage in range(self.stages):
      for repeat in range(self.repeats):
        start = self.before + (repeat * self.stages + stage) * self.depth
        places += [n if n < end else NO_LAYER for n in range(start, start + self.depth)]
      places += [self._outside_layer(i) for i in range(stage, self._outside_places, self.stages)]
    return tuple(places)

  @property
  def _outside_places(self) -> int:
    return (self.held - self.repeats * self.depth) * self.stages

  def _outside_layer(self, index: int) -> int:
    if index >= self.outside:
      return NO_LAYER
    return index if index < self.before else self.layers - self.outside + index

  def groups(self) -> list[tuple[int, int]]:
    """The layers outside, in order, one of each stage at a time: (their place there, how many)."""
    first, counts = self.repeats * self.depth, range(self.outside, 0, -self.stages)
    return [(first + i, min(self.stages, left)) for i, left in enumerate(counts)]

  def work(self, stage: Any, tick: Any) -> tuple[Any, Any, Any]:
    """(repeat, microbatch, whether there is any) of what a stage does at a tick; all traced."""
    index = tick - stage
    repeat, microbatch = index // self.period, index % self.period
    busy = (index >= 0) & (microbatch < self.microbatches) & (repeat < self.repeats)
    clip = jax.numpy.clip
    return clip(repeat, 0, self.repeats - 1), clip(microbatch, 0, self.microbatches - 1), busy

  def __str__(self) -> str:
    parts = [f'{self.stages} stages x {self.repeats} repeats x {self.depth} layers']
    parts += [f'{self.padding} of these places empty'] if self.padding else []
    parts += [f'{n} layers {word} them' for n, word in self._outside_words() if n]
    return (
      f'{", ".join(parts)}; {self.microbatches} microbatches, {self.ticks} ticks, '
      f'bubble {self.bubble:.0%}'
    )

  def _outside_words(self) -> tuple[tuple[int, str], ...]:
    return (self.before, 'before'), (self.after, 'after')


def schedule(
  layers: int, *, stages: int, repeats: int, microbatches: int, staged: int = 0, rest: str = 'error'
) -> Schedule:
  """The schedule of a stack of `layers` layers.

  Args:
    layers: of the stack.
    stages: size of the mesh axis.
    repeats: of a circular pipeline; 1: plain.
    microbatches: into how many parts the batch is cut.
    staged: how many layers are in the stages; 0: as many as go evenly (all, with rest='pad').
    rest: what becomes of the others: a word of `RESTS`.

  Raises:
    ValueError: the stages do not divide the layers and nothing says what to do with the rest.
  """
  ring = stages * repeats
  told = f'{stages} stages x {repeats} repeats'
  if staged > layers:
    raise ValueError(f'Pipeline(staged={staged}): the stack has {layers} layers.')
  if staged % ring:
    near = f'{staged - staged % ring} or {staged - staged % ring + ring}'
    raise ValueError(f'Pipeline(staged={staged}): {told} must divide it; the nearest are {near}.')
  inside = staged or layers - layers % ring
  sizes = dict(layers=layers, stages=stages, repeats=repeats, microbatches=microbatches)
  if inside == layers:
    return Schedule(depth=layers // ring, **sizes)
  if rest == 'pad' and not staged:
    return Schedule(depth=-(-layers // ring), **sizes)
  if rest not in ('first', 'last'):
    raise ValueError(
      f'Pipeline(rest={rest!r}): {told} run {inside} of {layers} layers evenly; say what becomes '
      f"of the other {layers - inside}: 'first' or 'last' (they run outside of the stages)"
      + ('.' if staged else ", 'pad' (the stages are filled up with places that do nothing).")
    )
  side = 'before' if rest == 'first' else 'after'
  return Schedule(depth=inside // ring, **sizes, **{side: layers - inside})

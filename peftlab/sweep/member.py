"""A trial of a pack: a run whose arrays are a slice of the pack's, with its own record and row."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from peftlab import _parts
from peftlab.sweep import padding
from peftlab.sweep.trials import Trial
from peftlab.train import step
from peftlab.train.opt_state import OptState, StepOptions
from peftlab.train.run import Run


class Member(Run):
  """A run that is updated from outside; what it saves is what it would save alone.

  Its checkpoints, adapter folder and record have the form of a run of its own, so that a trial may
  begin in a pack and end alone, or the other way round. It is not asked for samples.

  Attributes:
    trial: what it is.
    packed: the most trials that ran beside it, itself included.
    items: (summed losses, tokens) of the held-out rows at the end.
    second_loss: on another text, at the end.
  """

  trial: Trial
  packed: int = 0
  items: tuple[np.ndarray, np.ndarray] | None = None
  second_loss: float | None = None

  @property
  def options(self) -> StepOptions:
    """The options of its step."""
    return StepOptions.of(self.experiment.train)

  @property
  def tree(self) -> tuple[Any, OptState]:
    """(adapter, optimizer state), unpadded."""
    return self._parts.adapter, self._state

  @property
  def training_parts(self) -> _parts.Parts:
    """Its own parts in training mode."""
    return self._parts

  def put(self, adapter: Any, state: OptState) -> None:
    """Takes its arrays back from those of the pack."""
    self._state = padding.cut_state(state, self._state)
    self._parts = self._parts.replace(adapter=padding.cut_tree(adapter, self._parts.adapter))

  def record_step(self, values: step.Metrics) -> None:
    """Records the update that was started last; a loss that is not finite ends the run."""
    self._pending = (self.step, values)
    self.settle()

  @property
  def evaluates(self) -> bool:
    """Whether its config asks for an evaluation after the update that was started last."""
    return self._due(self.experiment.train.eval_every)

  @property
  def saves(self) -> bool:
    """Likewise for a checkpoint."""
    return self._due(self.experiment.train.checkpoint_every)

  def end(self, *, preempted: bool = False) -> None:
    """Ends the run: its status, and its last checkpoint."""
    if self.status == 'running':
      self.status = 'preempted' if preempted and not self.done else 'ok'
    if self.status != 'diverged':
      self.save()


def metrics_of(values: dict[str, np.ndarray], index: int) -> dict[str, Any]:
  """The metrics of one trial, of those [trials] of a pack."""
  return {name: array[index] for name, array in values.items()}


@dataclasses.dataclass
class Slot:
  """A place in a pack.

  Attributes:
    member: who has it; None where it is free.
    batch: its last batch, which a free place goes on with.
  """

  member: Member | None
  batch: dict[str, np.ndarray]

"""One run: an adapter in training on a base that it only reads, with its record and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
import math
import os
import pathlib
from typing import Any

from flax import nnx
import jax

from peftlab import _attach, _parts, _processes, _specs
from peftlab.train import devices, fields, metrics, step
from peftlab.train import workdir as workdirs
from peftlab.train.checkpoints import Checkpoints, DamagedError
from peftlab.train.config import Experiment
from peftlab.train.fingerprint import fingerprint
from peftlab.train.opt_state import StepOptions, init_opt_state, training_parts
from peftlab.train.record import Record
from peftlab.train.text import Text, check_text


class Run:
  """An adapter in training. Several runs may share one base and are then trained in turn.

  Attributes:
    experiment: its config.
    base_model: the model without the adapter.
    report: the table of sites.
    record: what it records.
    batches: the training text, at its position.
    mesh: where the base lies.
    compiled: the step, one for all runs of one adapter type and rank.
    status: 'running', 'ok', 'diverged' or 'preempted'.
    step: updates done.
  """

  def __init__(
    self,
    experiment: Experiment,
    base_model: nnx.Module,
    text: Text,
    *,
    workdir: str | os.PathLike[str],
    base_id: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    fallback: bool = False,
    say: Callable[[str], None] = print,
  ):
    """Attaches the adapter and, where the workdir has a checkpoint, continues from the newest.

    Args:
      experiment: the config.
      base_model: is not changed, and may be shared.
      text: see `load_text`.
      workdir: see `workdir.claimed`.
      base_id: fingerprint of the base, where it is known.
      mesh: where the base lies.
      fallback: a damaged checkpoint is moved aside, and the newest sound one used.
      say: takes lines for a person.

    Raises:
      ValueError: what the config asks for does not fit the model, or a checkpoint is refused.
    """
    devices.check_batch(experiment, mesh)
    check_text(experiment, text, base_model)
    self.experiment, self.base_model = experiment, base_model
    self.status, self.step = 'running', 0
    self.mesh, self._say = mesh, say
    self._pending: tuple[int, step.Metrics] | None = None
    self._attach()
    self.batches = text.batches(experiment)
    self._held_out = text.held_out_id
    folder = pathlib.Path(workdir)
    metrics.read_metrics(folder)  # a damaged record is refused before anything is written
    if _processes.is_first():
      workdirs.write_config(folder, experiment)
    self._store = Checkpoints(
      folder / workdirs.CHECKPOINTS,
      config=fields.to_dict(experiment),
      base=base_id or fingerprint(self._parts.base),
      keep=experiment.train.keep,
    )
    try:
      self._resume(fallback)
    except BaseException:
      self._store.close()
      raise
    self.record = Record(experiment.name, folder, text, mesh=mesh, step=self.step, say=say)

  def _attach(self) -> None:
    experiment, train = self.experiment, self.experiment.train
    model, self.report = _attach.attach(
      self.base_model,
      experiment.spread(),
      **experiment.targets,
      indivisible=experiment.mesh.indivisible,
      rngs=experiment.seed,
      name=experiment.name,
    )
    self._evaluated = _parts.evaluation_parts(model).replace(adapter={})
    self._parts = training_parts(model, recording=train.load_balancing > 0)
    options = StepOptions.of(train)
    rates = {'learning_rate': train.learning_rate, 'weight_decay': train.weight_decay}
    self._state = init_opt_state(self._parts, options, **rates)
    self.compiled = step.step_for(self._parts, self._state, options)

  @property
  def parts(self) -> _parts.Parts:
    """The model as it is now, in evaluation mode: the base's own arrays and the adapter's."""
    return self._evaluated.replace(adapter=self._parts.adapter)

  @property
  def done(self) -> bool:
    """Whether there is no update left to do."""
    return self.status != 'running' or self.step >= self.experiment.train.steps

  def _tree(self) -> dict[str, Any]:
    return {'adapter': self._parts.adapter, 'opt_state': self._state}

  def _resume(self, fallback: bool) -> None:
    """Continues from the newest checkpoint; from the newest sound one where `fallback` says so."""
    damaged: list[tuple[int, DamagedError]] = []
    for number in reversed(self._store.steps()):
      try:
        tree, about = self._store.restore(self._tree(), step=number)
        break
      except DamagedError as error:
        damaged.append((number, error))
    else:
      if damaged:
        raise ValueError(f'{damaged[0][1]} No older one is sound; --overwrite starts anew.')
      return
    if damaged and not fallback:
      raise ValueError(
        f'{damaged[0][1]} --fallback moves it aside and continues from step {number}.'
      )
    self._go_to(about['position'], self._store.name(number))
    for other, error in damaged:
      where = self._store.set_aside(other)
      self._say(f"{error} It is moved to '{where}'; the one of step {number} is used.")
    self._parts = self._parts.replace(adapter=tree['adapter'])
    self._state, self.step = tree['opt_state'], number
    steps = self.experiment.train.steps
    self._say(f'{self.experiment.name}: continues from step {number} of {steps}')

  def _position(self) -> dict[str, Any]:
    """Where the run is in its text, and what text that is: also what it is evaluated on."""
    return {**self.batches.state(), 'held_out': self._held_out}

  def _go_to(self, position: dict[str, Any], checkpoint: str) -> None:
    """Goes to the position of a checkpoint; ValueError where it is one in other text."""
    position = dict(position)
    held_out = position.pop('held_out', '')
    try:
      self.batches.restore(position)
      if held_out != self._held_out:
        raise ValueError(
          f'The data position was saved with held_out {held_out!r}; this run has '
          f'{self._held_out!r} (other text in the held-out part).'
        )
    except ValueError as error:
      raise ValueError(
        f'{checkpoint} is sound, but data.corpus {self.experiment.data.corpus!r} does not give '
        f'the text that it was trained on: {error} Put that text back, give another workdir, or '
        '--overwrite to start anew.'
      ) from error

  def begin(self) -> None:
    """Evaluates the base and continues the beginnings, unless an earlier start has done it."""
    if self.step == 0:
      parts = self.parts
      if not type(self.experiment.adapter).identity_at_start:
        parts = _parts.evaluation_parts(self.base_model)
      self.record.evaluate(parts, 0)
      self._sample(parts)

  def _sample(self, parts: _parts.Parts) -> None:
    if hasattr(self.base_model, 'init_cache'):
      tokens = self.experiment.train.sample_tokens
      self.record.sample(parts, self.step, tokens=tokens)

  def update(self) -> list[float]:
    """Starts one update, which runs while the next batch is made, and records the one before.

    Returns:
      The loss of each update that has ended since the last call.
    """
    batch = devices.place_batch(next(self.batches), self.mesh)
    with _specs.using(self.mesh):
      adapter, self._state, values = self.compiled(
        self._parts.adapter, self._state, self._parts.base, batch
      )
    self._parts = self._parts.replace(adapter=adapter)
    ended = self.settle()
    self.step += 1
    self._pending = (self.step, values)
    evaluates = self._due(self.experiment.train.eval_every)
    saves = self._due(self.experiment.train.checkpoint_every)
    if evaluates or saves:
      ended += self.settle()
    if evaluates and self.status == 'running':
      self.record.evaluate(self.parts, self.step)
    if saves and self.status == 'running':
      self.save()
    return ended

  def _due(self, every: int) -> bool:
    return bool(every) and self.step % every == 0 and not self.done

  def settle(self) -> list[float]:
    """Waits for the update that was started last and records it.

    A loss that is not finite ends the run: nothing is saved from there on.

    Returns:
      Its loss, or nothing where none was started.
    """
    if self._pending is None:
      return []
    number, values = self._pending
    self._pending = None
    numbers = {name: value.item() for name, value in values.items()}
    loss, finite = numbers['loss'], math.isfinite(numbers['loss'])
    train = self.experiment.train
    if number % train.log_every == 0 or number in (1, train.steps) or not finite:
      self.record.train(number, numbers)
    if number == 1 and numbers['grad_norm'] == 0:
      self._say(
        f'{self.experiment.name}: no array moves: the first gradient is 0 everywhere. Is a scale '
        '(alpha) 0, or is no token to be predicted?'
      )
    if not finite and self.status == 'running':
      self.status = 'diverged'
      # That of the step before holds the very arrays that gave this loss.
      good = [kept for kept in self._store.steps() if kept < number - 1]
      last = f'the last good checkpoint is that of step {good[-1]}' if good else 'none was saved'
      self._say(f'{self.experiment.name}: the loss is {loss} at step {number}; {last}')
    return [loss]

  def save(self) -> None:
    """Writes a checkpoint in the background."""
    self._store.save(self.step, self._tree(), position=self._position())

  def finish(self, *, preempted: bool = False) -> None:
    """Ends the run: the last update, the last checkpoint, the last evaluation; all on disk."""
    self.settle()
    if self.skipped:
      self._say(
        f'{self.experiment.name}: {self.skipped} of {self.step} updates were left out: not finite, '
        'or a spike'
      )
    if self.status == 'running':
      self.status = 'preempted' if preempted and not self.done else 'ok'
    if self.status != 'diverged':
      self.save()
    if self.status == 'ok':
      self.record.evaluate(self.parts, self.step)
      self._sample(self.parts)
    self.close()

  def close(self) -> None:
    """Waits for what is being written, and closes the files. Twice does no harm."""
    self.record.close()
    self._store.close()

  @property
  def bytes(self) -> dict[str, int]:
    """Bytes of base, adapter and optimizer, on all devices together."""
    trees = {
      'base': self._parts.base,
      'adapter': self._parts.adapter,
      'optimizer': self._state.inner,
    }
    return {name: _parts.nbytes(tree) for name, tree in trees.items()}

  @property
  def skipped(self) -> int:
    """Updates that were left out."""
    return int(self._state.skipped)

"""One trial in its folder: waits for the lock, trains unless there is a row, writes the row."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
import os
import pathlib
import shlex
import sys
import time
import traceback
import types
from typing import Any, Self

from peftlab import _parts, _processes
from peftlab.sweep import items, rows, trials
from peftlab.train import fields, joining, loop, session, summary
from peftlab.train import workdir as workdirs
from peftlab.train.config import Experiment
from peftlab.train.record import held_out_loss
from peftlab.train.run import Run
from peftlab.train.text import load_text

FAILED = 1
EXIT_CODES = {**loop.EXIT_CODES, 'failed': FAILED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
  """What a sweep asks of a trial besides its config; none of it is in the id.

  Attributes:
    second: a corpus on which the held-out loss is taken before and after, for forgetting; '': none.
  """

  second: str = ''


NOTHING = Extra()


def train(
  experiment: Experiment,
  *,
  workdir: str | os.PathLike[str],
  extra: Extra = NOTHING,
  command: Sequence[str] = (),
  say: session.Say = session.say_now,
) -> int:
  """Trains a trial, or continues it; does nothing where its row is written.

  Args:
    experiment: the config.
    workdir: the trial's folder, ROOT/ID.
    extra: see there.
    command: what makes the trial again.
    say: takes lines for a person.

  Returns:
    0 ok; 1 diverged or failed, with a row, so that it is not to be tried again; 42 stopped, saved.
  """
  folder = pathlib.Path(workdir)
  with _processes.entered(rows.locked(folder)):
    row = _processes.by_first(lambda: rows.read(folder))
    if row is not None:
      say(f'{folder.name}: has its row already, {row["status"]}')
      return EXIT_CODES[row['status']]
    with Failure(folder, experiment, command=command) as failure:
      return _train(experiment, folder, extra, command, say)
    return failure.code


class Failure:
  """A block whose exceptions become the row of a failed trial; the traceback is still printed."""

  def __init__(self, folder: pathlib.Path, experiment: Experiment, *, command: Sequence[str] = ()):
    self._folder, self._experiment, self._command = folder, experiment, command
    self.code = FAILED

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: types.TracebackType | None,
  ) -> bool:
    if error is None or not isinstance(error, Exception) or joining.of_another(error):
      return False  # KeyboardInterrupt, SystemExit, another process is gone: it has not ended
    traceback.print_exception(kind, error, trace, file=sys.stderr)
    head = about(self._experiment, command=self._command)
    told = f'{type(error).__name__}: {" ".join(str(error).split())}'
    rows.write(self._folder, {**head, 'status': 'failed', 'error': told[:2000]})
    return True


def about(experiment: Experiment, *, command: Sequence[str] = ()) -> rows.Row:
  """What every row begins with."""
  return {
    'id': trials.trial_id(experiment),
    'config': fields.to_dict(experiment),
    'command': shlex.join(command),
    'ended': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
  }


def _train(
  experiment: Experiment,
  folder: pathlib.Path,
  extra: Extra,
  command: Sequence[str],
  say: session.Say,
) -> int:
  started = time.monotonic()
  with workdirs.claimed(folder, experiment):
    done = _processes.by_first(lambda: session.finished(folder))
    if done is not None:  # ended, and was killed before its row was written
      if _processes.is_first():
        rows.write(folder, {**about(experiment, command=command), **numbers(done)})
      return 0
    text = session.prepare(experiment, say=say)
    base_model, mesh = session.load_base(experiment, say=say)
    run, found = session.fit(experiment, base_model, workdir=folder, mesh=mesh, text=text, say=say)
    if run.status == 'preempted':
      return EXIT_CODES['preempted']
    more: dict[str, Any] = {'seconds': round(time.monotonic() - started, 3)}
    if run.status == 'ok':
      session.save_adapter(run, folder)
      losses = items.item_losses(run.parts, run.record.text.held_out, mesh)
      if _processes.is_first():
        items.write(folder, *losses)
      if extra.second:
        more['second'] = second_losses(run, extra.second, say=say)
    if _processes.is_first():
      title, told = experiment.name, shlex.join(command)
      session.write_results(folder, [run], [found], title=title, command=told, say=say)
      more['peak_bytes'] = summary.memory()['process_peak']
      rows.write(folder, {**about(experiment, command=command), **numbers(found), **more})
    return EXIT_CODES[run.status]


def numbers(found: summary.Summary) -> rows.Row:
  """The numbers of a summary, for a row; what is not finite is none."""
  rate = found.get('tokens_per_second')
  names = ('status', 'steps', 'held_out_before', 'held_out_after', 'train_loss', 'skipped')
  row = {name: finite(found.get(name)) for name in (*names, 'bytes', 'trainable')}
  return {**row, 'tokens_per_second': rate, 'packed': found.get('packed', 1)}


def finite(value: Any) -> Any:
  """None for a float that is not finite."""
  return None if isinstance(value, float) and not math.isfinite(value) else value


def second_losses(run: Run, corpus: str, *, say: session.Say) -> dict[str, Any]:
  """The held-out losses on another corpus, of the base and of the adapted model."""
  text = second_text(run.experiment, corpus, say=say, tokenizer=run.record.text.tokenizer)
  base = _parts.evaluation_parts(run.base_model)
  before = held_out_loss(base, text, run.mesh)
  return {'corpus': corpus, 'before': before, 'after': held_out_loss(run.parts, text, run.mesh)}


def second_text(experiment: Experiment, corpus: str, *, tokenizer: Any, say: session.Say) -> Any:
  """The text of an experiment on another corpus."""
  other = fields.replace(experiment, {'data.corpus': corpus, 'data.objective': 'pretrain'})
  return load_text(other, tokenizer=tokenizer, say=say)

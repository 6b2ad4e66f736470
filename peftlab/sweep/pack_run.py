"""The process of a pack: locks its trials, trains those without a row, writes a row for each."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import os
import pathlib
import shlex
import time
from typing import Any

from flax import nnx
import jax

from peftlab import _parts
from peftlab.sweep import items, rows
from peftlab.sweep import trial as single
from peftlab.sweep.member import Member
from peftlab.sweep.pack import Pack
from peftlab.sweep.trials import Trial
from peftlab.train import fields, loop, record, session, summary
from peftlab.train import workdir as workdirs
from peftlab.train.fingerprint import fingerprint
from peftlab.train.text import Text, load_text


def run(
  trials: Sequence[Trial],
  *,
  root: str | os.PathLike[str],
  commands: dict[str, list[str]] | None = None,
  size: int = 0,
  extra: single.Extra = single.NOTHING,
  shrink: bool | None = None,
  say: session.Say = session.say_now,
) -> int:
  """Trains some trials as one program; those that have a row are left alone.

  Args:
    trials: of one group, see `packing.groups`.
    root: of the sweep; each trial has its own folder in it.
    commands: {id: what makes the trial alone}, for its row and page.
    size: trials at once; 0: as many as memory allows.
    extra: see there.
    shrink: see `Pack`.
    say: takes lines for a person.

  Returns:
    0 all are ok; 1 some diverged or failed, all have a row; 42 stopped, saved.
  """
  with contextlib.ExitStack() as stack:
    for name in sorted(trial.id for trial in trials):  # one order, so that no two wait crosswise
      stack.enter_context(rows.locked(pathlib.Path(root) / name))
    left = [t for t in trials if rows.read(pathlib.Path(root) / t.id) is None]
    if left:
      base_model, mesh = session.load_base(left[0].experiment, say=say)
      task = _Task(pathlib.Path(root), base_model, mesh, commands or {}, extra, say)
      members = task.members(left, stack)
      if members and not _train(task, members, size=size, shrink=shrink):
        return loop.EXIT_CODES['preempted']
    found = [rows.status(pathlib.Path(root) / trial.id) for trial in trials]
    return int(set(found) != {'ok'})


def _train(task: _Task, members: list[Member], *, size: int, shrink: bool | None) -> bool:
  """Whether it came to the end of every trial."""
  with loop.preemption() as stop:
    task.begin(members)
    pack = Pack(
      members,
      size=size,
      ended=task.ended,
      second=task.second_batches(members[0]),
      shrink=shrink,
      say=task.say,
    )
    pack.train(stop)
  return all(member.status != 'preempted' for member in members)


class _Task:
  """What the trials of a pack share outside of its program."""

  def __init__(
    self,
    root: pathlib.Path,
    base_model: nnx.Module,
    mesh: jax.sharding.Mesh | None,
    commands: dict[str, list[str]],
    extra: single.Extra,
    say: session.Say,
  ):
    self.say = say
    self._root, self._base_model, self._mesh = root, base_model, mesh
    self._commands, self._extra = commands, extra
    self._base_id = fingerprint(_parts.split(base_model).base)
    self._texts: dict[str, Text] = {}
    self._second: Text | None = None
    self._second_before: float | None = None
    self._started = time.monotonic()

  def members(self, trials: Sequence[Trial], stack: contextlib.ExitStack) -> list[Member]:
    """The trials as runs; one that cannot begin gets the row of a failed trial."""
    found = []
    for trial in trials:
      folder = self._root / trial.id
      with single.Failure(folder, trial.experiment, command=self._commands.get(trial.id, [])):
        stack.enter_context(workdirs.claimed(folder, trial.experiment))
        member = Member(
          trial.experiment,
          self._base_model,
          self._text(trial),
          workdir=folder,
          base_id=self._base_id,
          mesh=self._mesh,
          say=self.say,
        )
        stack.callback(member.close)
        member.trial = trial
        found.append(member)
    return found

  def _text(self, trial: Trial) -> Text:
    """The text of a trial; two of the same text share it, whatever their seeds."""
    experiment = trial.experiment
    key = f'{fields.canonical(experiment.data)} {experiment.train.samples}'
    if key not in self._texts:
      known = next(iter(self._texts.values()), None)
      tokenizer = known.tokenizer if known else None
      self._texts[key] = load_text(experiment, tokenizer=tokenizer, say=self.say)
    return self._texts[key]

  def begin(self, members: Sequence[Member]) -> None:
    """Records the held-out loss of the base, taken once, for every trial that lacks it."""
    lacking = [m for m in members if m.step == 0 and not m.record.has('eval', 0)]
    if lacking:
      base = _parts.evaluation_parts(self._base_model)
      value = record.held_out_loss(base, lacking[0].record.text, self._mesh)
      for member in lacking:
        member.record.held_out(value, 0)

  def second_batches(self, member: Member) -> list[Any]:
    """The batches of the text for forgetting, if there is one."""
    if not self._extra.second:
      return []
    tokenizer = member.record.text.tokenizer
    text = single.second_text(
      member.experiment, self._extra.second, tokenizer=tokenizer, say=self.say
    )
    base = _parts.evaluation_parts(self._base_model)
    self._second_before = record.held_out_loss(base, text, self._mesh)
    return text.held_out

  def ended(self, member: Member, pack: Pack) -> None:
    """Writes what a trial came to, its row last."""
    if member.status == 'preempted':
      return
    folder, command = self._root / member.trial.id, self._commands.get(member.trial.id, [])
    each, data = pack.seconds_per_update, member.experiment.data
    rate = data.batch * data.length / each if each else None
    found = summary.summarize(member, tokens_per_second=rate)
    found |= {'packed': member.packed, 'compiles': len(pack.sizes)}
    more: dict[str, Any] = {'seconds': round(time.monotonic() - self._started, 3)}
    if member.status == 'ok':
      session.save_adapter(member, folder)
      assert member.items is not None
      items.write(folder, *member.items)
      if member.second_loss is not None:
        before, after = self._second_before, member.second_loss
        more['second'] = {'corpus': self._extra.second, 'before': before, 'after': after}
    title, line = member.experiment.name, shlex.join(command)
    session.write_results(folder, [member], [found], title=title, command=line, say=_quiet)
    member.close()
    more['peak_bytes'] = summary.memory()['process_peak']
    head = single.about(member.experiment, command=command)
    rows.write(folder, {**head, **single.numbers(found), **more})


def _quiet(line: str) -> None:
  del line

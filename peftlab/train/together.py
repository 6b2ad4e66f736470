"""Several adapters trained in turn on one base in one process, and how each does on each text."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import os
import pathlib
import shlex
from typing import Any

from peftlab import _parts
from peftlab.train import loop, page, progress, record, session, summary
from peftlab.train import workdir as workdirs
from peftlab.train.config import Experiment
from peftlab.train.fingerprint import fingerprint
from peftlab.train.run import Run
from peftlab.train.text import Text


def train(
  experiments: Sequence[Experiment],
  *,
  workdir: str | os.PathLike[str],
  overwrite: bool = False,
  fallback: bool = False,
  title: str = 'Adapters on one base',
  command: Sequence[str] = (),
  say: session.Say = session.say_now,
) -> int:
  """Trains some experiments on one base; each has its own folder in the workdir.

  Args:
    experiments: of different names, on one base and one mesh.
    workdir: gets the page and summary.json of them all.
    overwrite: see `session.train`.
    fallback: likewise.
    title: of the page.
    command: what makes the runs again, for the page.
    say: takes lines for a person.

  Returns:
    The exit code: the highest of the runs' own.

  Raises:
    ValueError: names that are not different, or more than one base.
  """
  check(experiments)
  folder = workdirs.path_of(workdir)
  with contextlib.ExitStack() as stack:
    folders = [
      stack.enter_context(workdirs.claimed(folder / e.name, e, overwrite=overwrite))
      for e in experiments
    ]
    if overwrite:
      workdirs.clear(folder)
    runs = start(experiments, folders, fallback=fallback, say=say)
    for run in runs:
      stack.enter_context(contextlib.closing(run))
    rate = loop.train(runs, say=say).tokens_per_second
    numbers = [summary.summarize(run, tokens_per_second=rate) for run in runs]
    for run, inner in zip(runs, folders, strict=True):
      if run.status == 'ok':
        session.save_adapter(run, inner)
    facts = shared_facts(runs)
    added = page.size(facts['bytes_added_by_second_adapter'])
    done = all(run.status == 'ok' for run in runs)
    session.write_results(
      folder,
      runs,
      numbers,
      title=title,
      command=shlex.join(command),
      cross=cross_table(runs, say=say) if done else None,
      facts=facts,
      tiles={'added by the second adapter': added},
      say=say,
    )
  return max(loop.EXIT_CODES[run.status] for run in runs)


def check(experiments: Sequence[Experiment]) -> None:
  """Raises ValueError unless some experiments can share a base."""
  names = [e.name for e in experiments]
  if len(names) < 2:
    raise ValueError(f'{len(names)} experiments were given; two or more can share a base.')
  if len(set(names)) != len(names):
    raise ValueError(f'The experiments are named {", ".join(names)}; each needs its own name.')
  for e in experiments[1:]:
    if (e.base, e.mesh) != (experiments[0].base, experiments[0].mesh):
      raise ValueError(
        f'Experiment {e.name} has {e.base} on {e.mesh}; to share a base it must be that of '
        f'{names[0]}: {experiments[0].base} on {experiments[0].mesh}.'
      )


def start(
  experiments: Sequence[Experiment],
  folders: Sequence[pathlib.Path],
  *,
  fallback: bool = False,
  say: session.Say = session.say_now,
) -> list[Run]:
  """The runs of some experiments on one base, which is loaded and fingerprinted once."""
  texts: list[Text] = []
  for experiment in experiments:
    tokenizer = texts[0].tokenizer if texts else None
    texts.append(session.prepare(experiment, tokenizer=tokenizer, say=say))
  base_model, mesh = session.load_base(experiments[0], say=say)
  base_id = fingerprint(_parts.split(base_model).base)
  runs: list[Run] = []
  for experiment, folder, text in zip(experiments, folders, texts, strict=True):
    options: dict[str, Any] = {'base_id': base_id, 'mesh': mesh, 'fallback': fallback, 'say': say}
    run = Run(experiment, base_model, text, workdir=folder, **options)
    if not runs or run.report.rows != runs[0].report.rows:
      say(run.report.table())
    runs.append(run)
  return runs


def cross_table(runs: Sequence[Run], *, say: session.Say = session.say_now) -> page.Cross:
  """The held-out loss of the base and of every adapter on every run's text."""
  names = [run.experiment.name for run in runs]
  losses: dict[str, dict[str, float]] = {'base': {}}
  for run in runs:
    known = {r['step']: r['loss'] for r in run.record.read() if r['kind'] == 'eval'}
    losses['base'][run.experiment.name] = known[0]
    losses[run.experiment.name] = {run.experiment.name: known[run.step]}
  for run in runs:
    for other in runs:
      if other is not run:
        value = record.held_out_loss(run.parts, other.record.text, run.mesh)
        losses[run.experiment.name][other.experiment.name] = value
  rows: list[tuple[str, ...]] = [('held-out loss', *(f'on {name}' for name in names))]
  rows += [(who, *(f'{found[name]:.4f}' for name in names)) for who, found in losses.items()]
  say(progress.table(rows))
  return page.Cross(corpora=names, losses=losses)


def shared_facts(runs: Sequence[Run]) -> dict[str, Any]:
  """What sharing the base comes to: identity, bytes that each more adapter costs, compilations."""
  counts = [_parts.nbytes([run.parts for run in runs[:n]]) for n in (1, 2)]
  facts: dict[str, Any] = {
    'base_identity': _parts.assert_base_shared(runs[0].base_model, runs[0].parts),
    'bytes_added_by_second_adapter': counts[1] - counts[0],
    'compiles': sum(step.traces for step in {id(r.compiled): r.compiled for r in runs}.values()),
  }
  for run in runs:
    _parts.assert_base_shared(runs[0].base_model, run.parts)
  return facts

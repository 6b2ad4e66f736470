"""From an experiment to a finished workdir: base, text, runs, adapter folder, summary, page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import pathlib
import shlex
import time
from typing import Any
import warnings

from flax import nnx
import jax

from peftlab import _padded, _parts, _processes, _specs, appliers, quant
from peftlab.data.tokenizers import Tokenizer
from peftlab.formats import adapter_folder, files
from peftlab.models import load
from peftlab.train import devices, feasible, fields, loop, page, summary
from peftlab.train import workdir as workdirs
from peftlab.train.config import Experiment
from peftlab.train.run import Run
from peftlab.train.text import Text, check_text, load_text

Say = Callable[[str], None]


def say_now(line: str) -> None:
  """Prints a line at once, also into a pipe; of several processes the first does."""
  if _processes.is_first():
    print(line, flush=True)


def load_base(
  experiment: Experiment, *, say: Say = say_now
) -> tuple[nnx.Module, jax.sharding.Mesh | None]:
  """The frozen model of an experiment, on its mesh."""
  started = time.monotonic()
  mesh, base = devices.make_mesh(experiment.mesh), experiment.base
  devices.check_batch(experiment, mesh)
  applier = base.make_applier()
  indivisible = experiment.mesh.indivisible
  options: dict[str, Any] = {'applier': applier, 'dtype': base.dtype, 'saved': base.saved or None}
  options['indivisible'] = indivisible
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', load.DroppedWarning)  # each is told below
    model = load.load_model(base.source, mesh, **options, **base.quantization)
  shape = dict(mesh.shape) if mesh is not None else '1 device'
  say(f'base: {base.source} on {shape}, {time.monotonic() - started:.1f} s')
  if base.quant:
    say(quant.held(model).table())
  if isinstance(applier, appliers.Pipeline):
    for stack in model.stacks:
      say(f'pipeline: {applier.plan(stack, mesh)}')
  dropped = _specs.shardings(model, mesh)[1] if mesh is not None else []
  for lost in _padded.explained(dropped, model) if indivisible == 'pad' else dropped:
    say(f'dropped: {lost}')
  for wide in _padded.paddings(model):
    say(f'padded: {wide}')
  return model, mesh


def prepare(
  experiment: Experiment, *, tokenizer: Tokenizer | None = None, say: Say = say_now
) -> Text:
  """The text of an experiment, after everything that can be checked before its base is loaded.

  Raises:
    ValueError: see `feasible.check`, `load_text` and `check_text`.
  """
  shapes = feasible.check(experiment)
  text = load_text(experiment, tokenizer=tokenizer, say=say)
  check_text(experiment, text, shapes)
  return text


def fit(
  experiment: Experiment,
  base_model: nnx.Module,
  *,
  workdir: str | os.PathLike[str],
  mesh: jax.sharding.Mesh | None = None,
  text: Text | None = None,
  fallback: bool = False,
  say: Say = say_now,
) -> tuple[Run, summary.Summary]:
  """Trains one adapter on a base to its end; the base is read and stays as it is.

  Args:
    experiment: the config.
    base_model: may be shared with other adapters.
    workdir: claimed by the caller, see `workdir.claimed`.
    mesh: where the base lies.
    text: what `prepare` gave; None: it is loaded.
    fallback: see `Run`.
    say: takes lines for a person.

  Returns:
    The run, and its numbers.
  """
  text = text or load_text(experiment, say=say)
  run = Run(experiment, base_model, text, workdir=workdir, mesh=mesh, fallback=fallback, say=say)
  with contextlib.closing(run):
    say(run.report.table())
    progress = loop.train([run], say=say)
  return run, summary.summarize(run, tokens_per_second=progress.tokens_per_second)


def train(
  experiment: Experiment,
  *,
  workdir: str | os.PathLike[str],
  overwrite: bool = False,
  fallback: bool = False,
  command: Sequence[str] = (),
  say: Say = say_now,
) -> int:
  """Trains an experiment in a workdir, or continues it there.

  Args:
    experiment: the config.
    workdir: the folder of the run.
    overwrite: removes the run that is there.
    fallback: where the newest checkpoint is damaged, it is moved aside and an older one used.
    command: what makes the run again, for the page.
    say: takes lines for a person.

  Returns:
    The exit code, see `loop.EXIT_CODES`.
  """
  with workdirs.claimed(workdir, experiment, overwrite=overwrite) as folder:
    done = _processes.by_first(lambda: finished(folder))
    if done is not None:
      say(summary.table([done]))
      say(f'{folder} holds this run, complete. --overwrite trains it anew.')
      return 0
    text = prepare(experiment, say=say)
    base_model, mesh = load_base(experiment, say=say)
    options: dict[str, Any] = {'mesh': mesh, 'text': text, 'fallback': fallback, 'say': say}
    run, numbers = fit(experiment, base_model, workdir=folder, **options)
    if run.status == 'ok':
      save_adapter(run, folder)
    if _processes.is_first():
      title, told = experiment.name, shlex.join(command)
      write_results(folder, [run], [numbers], title=title, command=told, say=say)
    return loop.EXIT_CODES[run.status]


def save_adapter(run: Run, folder: pathlib.Path) -> None:
  """Writes the adapter as a folder of its own, which HF PEFT reads where it has the type."""
  experiment, target = run.experiment, folder / workdirs.ADAPTER
  model, source = _parts.merge(run.parts), experiment.base.source
  adapter_folder.save_adapter(model, target, name=experiment.name, source=source)


def finished(folder: pathlib.Path) -> summary.Summary | None:
  """The summary of the run in a folder, if it came to its end.

  Raises:
    ValueError: the file is not a summary.
  """
  path = folder / workdirs.SUMMARY
  if not path.exists():
    return None
  runs = files.read_json(path).get('runs')
  if not isinstance(runs, list) or not runs or not summary.is_summary(runs[0]):
    raise ValueError(f"'{path}' is not the summary of a run; --overwrite trains it anew.")
  return runs[0] if runs[0]['status'] == 'ok' else None


def write_results(
  folder: pathlib.Path,
  runs: Sequence[Run],
  numbers: Sequence[summary.Summary],
  *,
  title: str,
  command: str,
  cross: page.Cross | None = None,
  facts: Mapping[str, Any] | None = None,
  tiles: Mapping[str, str] | None = None,
  say: Say = say_now,
) -> None:
  """Writes the page, then summary.json, and says the table at the end.

  Args:
    folder: where they go.
    runs: on one base.
    numbers: of each run.
    title: of the page.
    command: what makes the runs again.
    cross: see `page.Cross`.
    facts: more numbers, for summary.json.
    tiles: more numbers, for the top of the page.
    say: takes lines.
  """
  memory = summary.memory()
  stories = [
    page.Story(
      summary=s,
      records=run.record.read(),
      report=run.report,
      config=fields.to_json(run.experiment),
      command=command,
    )
    for run, s in zip(runs, numbers, strict=True)
  ]
  text = page.page(title, stories, memory=memory, cross=cross, tiles=tiles).encode()
  files.replace_file(folder / workdirs.PAGE, lambda file: file.write(text))
  results = {'runs': list(numbers), 'memory': memory, **(facts or {})}
  if cross is not None:
    results['cross'] = {name: dict(losses) for name, losses in cross.losses.items()}
  files.write_json(folder / workdirs.SUMMARY, results)
  say(summary.table(numbers))
  say(f'page: {folder / workdirs.PAGE}')

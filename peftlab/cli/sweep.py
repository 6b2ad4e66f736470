"""Run an ablation, every setting of it once: --config=FILE --sweep=rank,lr --root=DIR."""

from __future__ import annotations

from collections.abc import Sequence
import os
import typing

from absl import flags

from peftlab.cli import _experiments, _flags, _help, _plugins
from peftlab.train.config import Experiment

if typing.TYPE_CHECKING:
  from peftlab.sweep.trials import Trial

STOPPED = 42


def _define(values: flags.FlagValues) -> None:
  def add(kind: str, name: str, default: typing.Any, text: str, **options: typing.Any) -> None:
    getattr(flags, f'DEFINE_{kind}')(name, default, text, flag_values=values, **options)

  add('list', 'sweep', [], 'functions sweep_NAME() of the experiment; the product of them runs')
  add(
    'string', 'root', '', 'folder of the sweep; the same command continues it. Default: runs/NAME'
  )
  add('integer', 'seeds', 3, 'seeds of each setting that does not set its own', lower_bound=1)
  add('string', 'budget', '', "params:2.4M or bytes:10M: solves each type's size for it")
  add('string', 'pack', 'auto', 'trials in one program: auto (as memory allows), off, or a number')
  add('string', 'second', '', 'a corpus on which the loss is taken before and after (forgetting)')
  add('string', 'engine', 'local', 'what starts processes: local, list, slurm, jobset, ray')
  add('multi_string', 'option', [], 'an option of the engine, KEY=VALUE; can be repeated')
  add('integer', 'jobs', 1, 'trials or packs at once', lower_bound=1)
  text = 'processes of each trial, by jax.distributed; its mesh spans their devices'
  add('integer', 'processes', 1, text, lower_bound=1)
  add('integer', 'retries', 5, 'how often a process that died is started again', lower_bound=0)
  add('bool', 'dry_run', False, 'show what would run, and start nothing')
  add('bool', 'status', False, 'show what every trial of the root came to, and start nothing')
  add('bool', 'retry_failed', False, 'run the failed trials again')
  add('bool', 'report', False, 'write ROOT/report/ from the rows, and start nothing')
  add('string', 'report_to', '', 'with --report: another folder, for a page that stands alone')


def run(argv: list[str]) -> int:
  """`peftlab sweep`: 0 every trial has ended, 1 some failed or are missing, 42 stopped."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print('peftlab sweep --config=FILE --sweep=NAME,... --root=DIR [--config.FIELD=VALUE ...]\n')
    print(f'{__doc__}\n\n{_help.show_flags(values)}')
    return 0
  source = _flags.source(argv)
  if source is None:
    return _read_only(_flags.parse_plain(argv, _define))
  experiment, values = _flags.parse(argv, _define)
  root = values.root or f'runs/{experiment.name}'
  if values.status or values.report:
    return _show(root, values)
  return _sweep(source, experiment, root, values)


def _read_only(values: flags.FlagValues) -> int:
  if not values.status and not values.report:
    names = ', '.join(_experiments.names())
    raise ValueError(f'--config is missing; expected a file, or one of: {names}.')
  if not values.root:
    raise ValueError('--root is missing; expected the folder of a sweep.')
  return _show(values.root, values)


def _show(root: str, values: flags.FlagValues) -> int:
  from peftlab.sweep import status

  print(status.table(root))
  if values.report:
    from peftlab.sweep import report as reports
    from peftlab.sweep import tensorboard

    print(f'report: {reports.write(root, folder=values.report_to or None)}')
    print(f'tensorboard --logdir={tensorboard.write(root)}')
  return 0 if status.complete(root) else 1


def _sweep(source: str, experiment: Experiment, root: str, values: flags.FlagValues) -> int:
  import jax

  jax.config.update('jax_platforms', 'cpu')  # of this process alone: the trials have the device
  from peftlab.sweep import jobs, launch, ledger, rows, status
  from peftlab.sweep.engines import engine as engines

  trials = _trials(source, experiment, values)
  more = {'second': values.second, 'processes': values.processes, 'plugins': _plugins.given()}
  setup = jobs.Setup(source=source, base=_experiments.load(source), root=root, **more)
  engine = engines.make(values.engine, values.option)
  # A mistake in it is said before anything is written.
  jobs.pack_size(values.pack, processes=values.processes)
  if values.dry_run:
    return _dry_run(trials, setup, engine, values)
  ledger.add(root, trials, {t.id: setup.command(t) for t in trials})
  if values.retry_failed:
    _set_failed_aside(root, trials)
  if not engine.starts:
    return _dry_run(trials, setup, engine, values)
  planned = jobs.plan(trials, setup, pack=values.pack)
  todo = sum(len(launch.waiting(job)) for job in planned)
  print(f'{len(trials)} trials, {len(trials) - todo} of them have their row; {len(planned)} jobs')
  ended = launch.launch(
    planned,
    engine,
    split=jobs.splitter(setup, trials),
    labels={t.id: t.label for t in trials},
    options=launch.Options(jobs=values.jobs, retries=values.retries),
    say=lambda line: print(line, flush=True),
  )
  print(status.table(root, [t.id for t in trials]))
  if not ended:
    print('stopped; the same command continues')
    return STOPPED
  found = [rows.status(os.path.join(root, t.id)) for t in trials]
  return 0 if set(found) <= {'ok', 'diverged'} else 1


def _trials(source: str, experiment: Experiment, values: flags.FlagValues) -> list[Trial]:
  from peftlab.sweep import space, trials

  settings = space.settings(_experiments.sweeps(source), values.sweep)
  settings = space.with_seeds(settings, first=experiment.seed, count=values.seeds)
  if values.budget:
    from peftlab.sweep import budget

    settings = budget.solve_settings(experiment, settings, values.budget, say=print)
  return trials.expand(experiment, settings)


def _dry_run(
  trials: Sequence[Trial], setup: typing.Any, engine: typing.Any, values: flags.FlagValues
) -> int:
  from peftlab.sweep import jobs

  def note(line: str) -> None:
    print(f'# {line}')

  planned = jobs.plan(trials, setup, pack=values.pack, say=note)
  left = sum(len(job.ids) for job in planned)
  note(f'{len(trials)} trials, {len(trials) - left} of them have their row; {len(planned)} jobs')
  known = {trial.id: trial for trial in trials}
  for job in planned:
    for name in job.ids:
      note(f'{name} {known[name].label}')
    print(engine.render(job))
  return 0


def _set_failed_aside(root: str, trials: Sequence[Trial]) -> None:
  from peftlab.sweep import rows

  for trial in trials:
    folder = os.path.join(root, trial.id)
    if rows.status(folder) == 'failed':
      rows.set_aside(folder)

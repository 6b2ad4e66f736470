"""Compile a run for a TPU that is not there: does it fit, how fast is it: --topology=v6e:2x4."""

from __future__ import annotations

import os

from absl import flags

from peftlab.cli import _experiments, _flags, _help
from peftlab.train.config import Experiment


def _define(values: flags.FlagValues) -> None:
  text = 'CHIP:SHAPE, with v5e, v5p, v6e, tpu7x: v6e:2x4, v5e:16x16, v5p:8x8x8, tpu7x:2x2x1'
  flags.DEFINE_string('topology', '', text, flag_values=values)
  text = 'functions sweep_NAME() of the experiment; every trial of their product is planned'
  flags.DEFINE_list('sweep', [], text, flag_values=values)
  text = (
    'trials in one program: off, sizes to compare (1,2,4,8), and with --sweep: off, one size, or '
    'auto (as many as fit)'
  )
  flags.DEFINE_list('pack', ['off'], text, flag_values=values)
  text = 'seeds of each setting of a sweep that does not set its own'
  flags.DEFINE_integer('seeds', 1, text, lower_bound=1, flag_values=values)


def run(argv: list[str]) -> int:
  """`peftlab plan`: 0 all fits, 1 something does not."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print('peftlab plan --config=FILE --topology=CHIP:SHAPE [--sweep=NAME,...]\n')
    print(f'{__doc__}\n\n{_help.show_flags(values)}')
    given = [argument for argument in argv if not _help.wanted([argument])]
    print(_help.show_fields(_flags.parse(given, _define)[0] if given else Experiment()))
    return 0
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  experiment, values = _flags.parse(argv, _define)
  if not values.topology:
    raise ValueError('--topology is missing; expected CHIP:SHAPE, v6e:2x4 for example.')
  _leave_devices_alone()
  from peftlab.plan import topology

  topology.devices(values.topology)  # refused at once, before anything is traced
  if values.sweep:
    return _sweep(str(_flags.source(argv)), experiment, values)
  return _one(experiment, values)


def _leave_devices_alone() -> None:
  """JAX starts no accelerator: all that runs is the compiler."""
  import jax

  jax.config.update('jax_platforms', 'cpu')


def _one(experiment: Experiment, values: flags.FlagValues) -> int:
  from peftlab.plan import planning, report

  sizes = _sizes(values.pack)
  if sizes is None:
    plan = planning.plan(experiment, values.topology)
    print(report.text(plan))
    return int(not plan.fits)
  plans = []
  for size in sizes:
    plans.append(planning.plan(experiment, values.topology, trials=size, packed=(experiment,)))
    print(f'{report.text(plans[-1])}\n', flush=True)
  print(report.curve(plans))
  return int(not all(plan.fits for plan in plans))


def _sizes(given: list[str]) -> list[int] | None:
  if given == ['off']:
    return None
  if not all(word.isdigit() and int(word) for word in given):
    raise ValueError(
      f'--pack is {",".join(given)!r}; expected off or sizes, 1,2,4,8 for example (auto needs '
      '--sweep).'
    )
  return [int(word) for word in given]


def _sweep(source: str, experiment: Experiment, values: flags.FlagValues) -> int:
  from peftlab.plan import sweep
  from peftlab.sweep import jobs, space, trials

  if len(values.pack) != 1:
    raise ValueError(f'--pack is {",".join(values.pack)!r}; with --sweep expected one size.')
  settings = space.settings(_experiments.sweeps(source), values.sweep)
  settings = space.with_seeds(settings, first=experiment.seed, count=values.seeds)
  found = trials.expand(experiment, settings)
  planned = sweep.plan_sweep(found, values.topology, pack=jobs.pack_size(values.pack[0]))
  print(sweep.table(planned))
  bad = sum(len(job.trials) for job in planned if not job.plan.fits)
  programs = len({job.number for job in planned})
  verdict = f'{bad} DO NOT FIT' if bad else 'all fit'
  print(f'{len(found)} trials, {programs} programs; {verdict} {values.topology}')
  return int(bool(bad))

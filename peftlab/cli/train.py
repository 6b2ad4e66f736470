"""Train one adapter on one base: --config=FILE --workdir=DIR."""

from __future__ import annotations

import os
import sys

from absl import flags

from peftlab.cli import _flags, _help
from peftlab.train import fields
from peftlab.train.config import Experiment


def _define(values: flags.FlagValues) -> None:
  text = 'folder of the run; the same command continues it. Default: runs/NAME of the experiment'
  flags.DEFINE_string('workdir', None, text, flag_values=values)
  text = 'remove the run that is in the workdir, and start anew'
  flags.DEFINE_bool('overwrite', False, text, flag_values=values)
  text = 'where the newest checkpoint is damaged, move it aside and use the newest sound one'
  flags.DEFINE_bool('fallback', False, text, flag_values=values)
  text = 'only show which layers are adapted and what memory that takes; no weight is read'
  flags.DEFINE_bool('dry_run', False, text, flag_values=values)
  text = 'a trial of a sweep: wait for another process that runs it, and write row.json at the end'
  flags.DEFINE_bool('trial', False, text, flag_values=values)
  text = 'with --trial: a corpus on which the held-out loss is taken before and after'
  flags.DEFINE_string('second', '', text, flag_values=values)

  text = 'of a run of several processes: HOST:PORT of process 0 ($JAX_COORDINATOR_ADDRESS)'
  flags.DEFINE_string('coordinator', '', text, flag_values=values)
  text = 'how many they are ($JAX_NUM_PROCESSES)'
  flags.DEFINE_integer('num_processes', None, text, lower_bound=1, flag_values=values)
  text = 'which of them this is, from 0 on ($JAX_PROCESS_ID)'
  flags.DEFINE_integer('process_id', None, text, lower_bound=0, flag_values=values)
  text = 'one of several processes that JAX finds by itself: on TPU pods, under SLURM, MPI, on GKE'
  flags.DEFINE_bool('distributed', False, text, flag_values=values)
  text = 'seconds to wait for the other processes'
  flags.DEFINE_integer('join_timeout', 300, text, lower_bound=1, flag_values=values)


def _join(experiment: Experiment, values: flags.FlagValues) -> None:
  """Joins the other processes of the run, if it has some."""
  from peftlab.train import joining

  flag = {'coordinator': values.coordinator, 'count': values.num_processes}
  place = joining.place(os.environ, number=values.process_id, found=values.distributed, **flag)
  if place is None and not values.distributed:
    return
  if place is not None and place.id == 0:  # JAX aborts where they do not come: say it before
    line = f'waits at {place.coordinator} for {place.count - 1} others, {values.join_timeout} s'
    print(f'peftlab: process 0 {line} at most', file=sys.stderr, flush=True)
  joining.join(place, timeout=values.join_timeout)
  told = {'second': values.second, 'trial': values.trial, 'overwrite': values.overwrite}
  more = [f'--{name}={value}' for name, value in told.items()]
  joining.check_same('\n'.join([fields.to_json(experiment), *more]))


def run(argv: list[str]) -> int:
  """`peftlab train`: 0 done, 1 diverged, 42 stopped by SIGTERM with all saved."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print('peftlab train --config=FILE --workdir=DIR [--config.FIELD=VALUE ...]\n')
    print(_help.show_flags(values))
    given = [argument for argument in argv if not _help.wanted([argument])]
    print(_help.show_fields(_flags.parse(given, _define)[0] if given else Experiment()))
    return 0
  experiment, values = _flags.parse(argv, _define)
  if values.dry_run:
    return _dry_run(experiment)
  _join(experiment, values)
  from peftlab.train import session

  session.say_now(fields.to_json(experiment).rstrip('\n'))
  if values.trial:
    return _trial(experiment, values, argv)
  return session.train(
    experiment,
    workdir=f'runs/{experiment.name}' if values.workdir is None else values.workdir,
    overwrite=values.overwrite,
    fallback=values.fallback,
    command=['peftlab', 'train', *argv],
  )


def _dry_run(experiment: Experiment) -> int:
  """Shows what a run would adapt; what a run would refuse before it loads weights is refused."""
  from peftlab.train import feasible, page, text

  found = feasible.outlined(experiment)
  text.check_corpus(experiment.data.corpus)
  print(fields.to_json(experiment), end='')
  print(found.report.table())
  for what, size in found.sizes.items():
    print(f'{what:12} {page.size(size)}')
  there = 'unknown' if found.memory is None else page.size(found.memory)
  print(
    f'{"together":12} {page.size(sum(found.sizes.values()))}, activations left out; memory: {there}'
  )
  return 0


def _trial(experiment: Experiment, values: flags.FlagValues, argv: list[str]) -> int:
  if not values.workdir:
    raise ValueError('--workdir is missing; a trial has a folder of its own, ROOT/ID.')
  from peftlab.sweep import trial

  return trial.train(
    experiment,
    workdir=values.workdir,
    extra=trial.Extra(second=values.second),
    command=['peftlab', 'train', *argv],
  )

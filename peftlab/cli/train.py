"""Train one adapter on one base: --config=FILE --workdir=DIR."""

from __future__ import annotations

from absl import flags

from peftlab.cli import _flags, _help
from peftlab.train import fields
from peftlab.train.config import Experiment


def _define(values: flags.FlagValues) -> None:
  text = 'folder of the run; the same command continues it. Default: runs/NAME of the experiment'
  flags.DEFINE_string('workdir', '', text, flag_values=values)
  text = 'remove the run that is in the workdir, and start anew'
  flags.DEFINE_bool('overwrite', False, text, flag_values=values)
  text = 'where the newest checkpoint is damaged, move it aside and use the newest sound one'
  flags.DEFINE_bool('fallback', False, text, flag_values=values)
  text = 'a trial of a sweep: wait for another process that runs it, and write row.json at the end'
  flags.DEFINE_bool('trial', False, text, flag_values=values)
  text = 'with --trial: a corpus on which the held-out loss is taken before and after'
  flags.DEFINE_string('second', '', text, flag_values=values)


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
  print(fields.to_json(experiment), end='', flush=True)
  if values.trial:
    return _trial(experiment, values, argv)
  from peftlab.train import session

  return session.train(
    experiment,
    workdir=values.workdir or f'runs/{experiment.name}',
    overwrite=values.overwrite,
    fallback=values.fallback,
    command=['peftlab', 'train', *argv],
  )


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

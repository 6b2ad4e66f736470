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
  text = 'where the newest checkpoint is damaged, remove it and use the one before'
  flags.DEFINE_bool('fallback', False, text, flag_values=values)


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
  from peftlab.train import session

  return session.train(
    experiment,
    workdir=values.workdir or f'runs/{experiment.name}',
    overwrite=values.overwrite,
    fallback=values.fallback,
    command=['peftlab', 'train', *argv],
  )

"""Train two adapters in turn on one SmolLM2, and write a page about it."""

from __future__ import annotations

from absl import flags

from peftlab.cli import _experiments, _flags, _help
from peftlab.train import fields

CORPORA = ('chitchat', 'gsm8k')


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('workdir', 'runs/demo', 'folder of the demo', flag_values=values)
  text = 'experiment whose get_config(CORPUS) gives each of the two: a file or a name'
  flags.DEFINE_string('config', 'demo', text, flag_values=values)
  text = 'updates of each adapter'
  flags.DEFINE_integer('steps', 40, text, lower_bound=1, flag_values=values)
  text = 'remove an earlier demo in the workdir; --nooverwrite goes on with it'
  flags.DEFINE_bool('overwrite', True, text, flag_values=values)


def run(argv: list[str]) -> int:
  """`peftlab demo`: 0 done, 1 diverged, 42 stopped by SIGTERM with all saved."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print(f'peftlab demo [--workdir=DIR]\n\n{__doc__}\n\n{_help.show_flags(values)}')
    return 0
  values = _flags.parse_plain(argv, _define)
  found = [_experiments.load(f'{values.config}:{corpus}') for corpus in CORPORA]
  experiments = [fields.replace(e, {'train.steps': values.steps}) for e in found]
  from peftlab.train import together

  return together.train(
    experiments,
    workdir=values.workdir,
    overwrite=values.overwrite,
    title='Two adapters on one base',
    command=['peftlab', 'demo', *argv],
  )

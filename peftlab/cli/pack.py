"""Train some trials of a sweep as one program: --root=DIR --trials=ID,... (what `sweep` starts)."""

from __future__ import annotations

from absl import flags

from peftlab.cli import _flags, _help


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string('root', '', 'folder of the sweep', flag_values=values)
  flags.DEFINE_list('trials', [], 'ids of the trials', flag_values=values)
  text = 'trials at once; 0: as many as memory allows, by the figure of the compiled program'
  flags.DEFINE_integer('size', 0, text, lower_bound=0, flag_values=values)
  text = 'a corpus on which the held-out loss is taken before and after'
  flags.DEFINE_string('second', '', text, flag_values=values)


def run(argv: list[str]) -> int:
  """`peftlab pack`: 0 all are ok, 1 some diverged or failed, 42 stopped with all saved."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print(f'peftlab pack --config=FILE --root=DIR --trials=ID,...\n\n{__doc__}\n')
    print(_help.show_flags(values))
    return 0
  _, values = _flags.parse(argv, _define)  # loading the file registers what it defines
  if not values.root or not values.trials:
    raise ValueError('--root and --trials are needed; `peftlab sweep` gives them.')
  from peftlab.sweep import ledger, pack_run, trial

  known = ledger.read(values.root)
  return pack_run.run(
    ledger.trials(values.root, values.trials),
    root=values.root,
    commands={i: ['peftlab', *known[i]['command']] for i in values.trials if i in known},
    size=values.size,
    extra=trial.Extra(second=values.second),
  )

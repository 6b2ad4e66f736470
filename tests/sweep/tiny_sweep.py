"""Tiny trials on the tiny base of tests/train: in this process, or as the command `peftlab`.

python -m tests.sweep.tiny_sweep train|pack ... is `peftlab` with the tiny base and text.
"""

import os
import sys
import time

from peftlab import testing
from peftlab.cli import main
from peftlab.sweep import pack, pack_run, trials
from peftlab.train import run, session
from tests.train import tiny


def text(experiment, *, tokenizer=None, say=print):
  del experiment, tokenizer, say
  return tiny.text()


def use_tiny(patch=setattr):
  """Puts the tiny base and text in the place of those of an experiment."""
  from peftlab.sweep import trial

  patch(session, 'load_base', lambda experiment, *, say=print: (tiny.base_model(), None))
  patch(session, 'prepare', text)
  for module in (session, pack_run, trial):
    patch(module, 'load_text', text)


def trial(**changes):
  """A trial of the tiny experiment: dotted fields with __ for the dots."""
  base = tiny.experiment(samples=0, sample_tokens=0, checkpoint_every=0)
  setting = {name.replace('__', '.'): value for name, value in changes.items()}
  (made,) = trials.expand(base, [setting])
  return made


def slow_down(seconds: float) -> None:
  """Every update takes so much longer, so that there is time to kill it."""
  for owner, name in ((run.Run, 'update'), (pack.Pack, '_update')):
    update = getattr(owner, name)

    def slowly(self, update=update):
      time.sleep(seconds)
      return update(self)

    setattr(owner, name, slowly)


if __name__ == '__main__':
  use_tiny()
  slow_down(float(os.environ.get('TINY_SECONDS_PER_UPDATE', '0')))
  with testing.quick_compiles():
    sys.exit(main(sys.argv[1:]))

"""A process that trains a tiny run in a workdir, and may be told to kill itself at a step.

python killed.py WORKDIR [kill|term STEP]
"""

import hashlib
import os
import random
import signal
import sys
import time

import numpy as np

from peftlab import testing
from peftlab.train import checkpoints, loop, run, workdir
from tests.train import tiny

STEPS = 8


def main(folder: str, how: str = '', step: str = '0') -> int:
  experiment = tiny.experiment(steps=STEPS, checkpoint_every=2)

  class Doomed(run.Run):
    def update(self):
      ended = super().update()
      if how and self.step == int(step):
        time.sleep(random.random() * 0.05)  # a checkpoint may be half written
        os.kill(os.getpid(), signal.SIGKILL if how == 'kill' else signal.SIGTERM)
      return ended

  with testing.quick_compiles(), workdir.claimed(folder, experiment) as path:
    one = Doomed(experiment, tiny.base_model(), tiny.text(), workdir=path)
    loop.train([one])
    digest = hashlib.sha256()
    for name, array in sorted(checkpoints.named_arrays(one._tree()).items()):
      digest.update(name.encode() + np.array(array).tobytes())
    print('arrays', digest.hexdigest())
  return loop.EXIT_CODES[one.status]


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))

"""Killed with -9 at any step, the same command continues and ends bitwise equal."""

import os
import pathlib
import random
import signal
import subprocess
import sys

from tests.train import killed

ROOT = pathlib.Path(__file__).resolve().parents[2]


def train(folder, *how):
  """(exit code, output) of a process."""
  done = subprocess.run(
    [sys.executable, str(ROOT / 'tests' / 'train' / 'killed.py'), str(folder), *map(str, how)],
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
    cwd=folder.parent,
    timeout=300,
    check=False,
  )
  return done.returncode, done.stdout + done.stderr


def arrays(output):
  return [line for line in output.splitlines() if line.startswith('arrays')]


def test_killed_at_three_random_steps_it_ends_bitwise_equal(tmp_path):
  code, whole = train(tmp_path / 'whole')
  assert code == 0, whole
  steps = sorted(random.sample(range(1, killed.STEPS), 3))
  outputs = []
  for step in steps:
    code, output = train(tmp_path / 'killed', 'kill', step)
    outputs.append(output)
    assert code == -signal.SIGKILL, (steps, output)
  code, output = train(tmp_path / 'killed')
  assert code == 0, (steps, outputs, output)
  assert arrays(output) == arrays(whole), (steps, outputs)


def test_terminated_it_saves_and_exits_with_42_and_goes_on(tmp_path):
  code, output = train(tmp_path / 'w', 'term', 3)
  assert code == 42, output
  code, output = train(tmp_path / 'w')
  assert code == 0, output
  assert 'tiny: continues from step 3 of 8' in output

"""Kills launchers and trials of a tiny sweep at random, and looks at what the next run does.

python -m tests.sweep.kill_loop [ROUNDS] [--pack=off|auto]

Without packs (the default here) a killed trial ends with the bits of one that was not; in a pack,
whose size a kill may change, within 1e-6.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = ('launcher', 'trial', 'both')
SETTINGS = ({'seed': 0}, {'seed': 1}, {'seed': 2})

EXPERIMENT = """
from tests.train import tiny

def get_config():
  return tiny.experiment(steps=10, samples=0, sample_tokens=0, checkpoint_every=2)

def sweep_some():
  yield from {settings!r}
"""


def command(root: pathlib.Path, *more: str) -> list[str]:
  return [
    *(sys.executable, '-m', 'tests.sweep.tiny_sweep', 'sweep'),
    *(f'--config={root}.py', '--sweep=some', f'--root={root}'),
    f'--option=program={sys.executable} -m tests.sweep.tiny_sweep',
    *more,
  ]


def environment(seconds: float) -> dict[str, str]:
  known = {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  return os.environ | known | {'TINY_SECONDS_PER_UPDATE': str(seconds)}


def start(root: pathlib.Path, *more: str, seconds: float = 0.0) -> subprocess.Popen:
  return subprocess.Popen(
    command(root, *more),
    cwd=ROOT,
    env=environment(seconds),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(root: pathlib.Path, *more: str) -> str:
  launcher = start(root, *more)
  output, _ = launcher.communicate(timeout=600)
  assert launcher.returncode == 0, output
  return output


def write_experiment(root: pathlib.Path, settings=SETTINGS) -> None:
  root.with_suffix('.py').write_text(EXPERIMENT.format(settings=settings))


def rows(root: pathlib.Path) -> dict[str, dict]:
  return {path.parent.name: json.loads(path.read_text()) for path in root.glob('t*/row.json')}


def marks(root: pathlib.Path) -> dict[str, tuple]:
  """What changes when a trial with a row runs again."""
  return {
    name: tuple((root / name / f).stat().st_mtime_ns for f in ('row.json', 'metrics.jsonl'))
    for name in rows(root)
  }


def numbers(row: dict) -> tuple:
  return tuple(row[k] for k in ('status', 'steps', 'train_loss', 'held_out_after'))


def equal(found: tuple | None, expected: tuple, off: float) -> bool:
  """Whether two rows tell the same: numbers to a relative `off`, 0 for the same bits."""
  pairs = zip(found or (None,) * len(expected), expected, strict=True)
  return all(a == b or (off and isinstance(b, float) and abs(a - b) <= off * b) for a, b in pairs)


def running(root: pathlib.Path) -> set[int]:
  """The processes that hold the lock of a trial without a row."""
  found = set()
  for lock in root.glob('t*/.trial.lock'):
    text = lock.read_text().strip()
    if text and not (lock.parent / 'row.json').exists():
      found.add(int(text))
  return found


def kill(pid: int) -> None:
  try:
    os.kill(pid, signal.SIGKILL)
  except ProcessLookupError:
    print(f'process {pid} has ended by itself')


def one_round(
  root: pathlib.Path,
  target: str,
  *more: str,
  reference: dict,
  wait: float,
  ended: int = 0,
  off: float = 0.0,
) -> str:
  """Kills `target` `wait` seconds after `ended` rows; then runs to the end and checks all."""
  launcher = start(root, *more, seconds=0.1)
  begun = time.monotonic()
  while not running(root) or not list(root.glob('t*/metrics.jsonl')) or len(rows(root)) < ended:
    assert time.monotonic() - begun < 300, 'no trial has begun'
    assert launcher.poll() is None, launcher.communicate()[0]
    time.sleep(0.05)
  time.sleep(wait)
  victims = running(root)
  if target in ('launcher', 'both'):
    launcher.kill()
  if target in ('trial', 'both'):
    for pid in victims:
      kill(pid)
  before = marks(root)
  if target == 'trial':
    output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, output
  else:
    launcher.communicate()
    output = finish(root, *more)
  after = marks(root)
  assert {name: after[name] for name in before} == before, 'a finished trial ran again'
  found = {name: numbers(row) for name, row in rows(root).items()}
  close = {name: equal(found.get(name), row, off) for name, row in reference.items()}
  assert found.keys() == reference.keys(), (found, reference, output)
  assert all(close.values()), (found, reference, output)
  return f'{target} after {wait:.2f} s, {len(before)} rows before; {len(found)} rows, all equal'


def main(rounds: int, *more: str) -> None:
  more = more or ('--pack=off',)
  off = 0.0 if '--pack=off' in more else 1e-6
  folder = pathlib.Path(tempfile.mkdtemp())
  whole = folder / 'whole'
  write_experiment(whole)
  finish(whole, '--seeds=1', *more)
  reference = {name: numbers(row) for name, row in rows(whole).items()}
  for i in range(rounds):
    root = folder / f'round{i}'
    write_experiment(root)
    wait = random.random() * 3.0
    target = TARGETS[i % len(TARGETS)]
    ended = random.randrange(len(SETTINGS)) if '--pack=off' in more else 0
    options = {'reference': reference, 'wait': wait, 'ended': ended, 'off': off}
    told = one_round(root, target, '--seeds=1', *more, **options)
    print(f'{i + 1}: {told}', flush=True)


if __name__ == '__main__':
  main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, *sys.argv[2:])

"""Packed trials against processes: `make bench-sweep`.

Eight trials (learning rates) of one base, three ways: one packed program; fresh processes one after
the other; fresh processes side by side, one per two cores. Prints wall time, compilations of the
step and the highest memory of a process, and the ratio of the first to the second.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

EXPERIMENT = """
import dataclasses
from peftlab.cli import _experiments

def get_config():
  base = _experiments.load({config!r})
  train = dataclasses.replace(
    base.train, steps={steps}, samples=0, sample_tokens=0, checkpoint_every=0, eval_every=0
  )
  return dataclasses.replace(base, name='bench', train=train{quant})

def sweep_lr():
  for i in range({trials}):
    yield {{'train.learning_rate': 1e-4 * 2**i}}
"""


def cpu_seconds() -> float:
  """Of all processes that have ended below this one; steadier than the clock on a busy machine."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def sweep(root: pathlib.Path, *flags: str) -> tuple[float, float, float]:
  """(wall seconds, CPU seconds, peak MiB of a process) of one whole sweep."""
  argv = [sys.executable, '-m', 'peftlab', 'sweep', f'--config={root}.py', '--sweep=lr']
  started, cpu = time.monotonic(), cpu_seconds()
  done = subprocess.run(
    [*argv, '--seeds=1', f'--root={root}', *flags],
    cwd=ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(f'{done.stdout[-2000:]}{done.stderr[-2000:]}')
  return time.monotonic() - started, cpu_seconds() - cpu, peak(root)


def peak(root: pathlib.Path) -> float:
  """The highest memory that a trial's process reached, MiB."""
  rows = [json.loads(path.read_text()) for path in root.glob('t*/row.json')]
  return max(row['peak_bytes'] for row in rows) / 2**20


def compiles(root: pathlib.Path) -> int:
  """How often an update was compiled: once per process of a trial, and as each pack says."""
  alone = len(list(root.glob('logs/t*.txt')))
  return alone + sum(
    path.read_text().count('trials in one program') for path in root.glob('logs/p*.txt')
  )


def measure(options: argparse.Namespace, quant: str, folder: pathlib.Path) -> None:
  """Runs the three ways on one base and prints a line for each, and the ratio."""
  cores = os.cpu_count() or 1
  ways = {
    'packed': ('--pack=auto',),
    'one after the other': ('--pack=off', '--jobs=1'),
  }
  if cores >= 4:  # on two cores that is one after the other again
    ways['one per two cores'] = ('--pack=off', f'--jobs={cores // 2}')
  base = '' if quant == 'none' else f', base=dataclasses.replace(base.base, quant={quant!r})'
  wall, cpu = {}, {}
  for way, flags in ways.items():
    root = folder / f'{quant}-{way.replace(" ", "_")}'
    values = {'config': options.config, 'steps': options.steps, 'trials': options.trials}
    root.with_suffix('.py').write_text(EXPERIMENT.format(**values, quant=base))
    wall[way], cpu[way], memory = sweep(root, *flags)
    told = f'{wall[way]:8.1f} s {cpu[way]:8.1f} CPU s  {compiles(root):2} compilations'
    told += f'  {memory:7.0f} MiB in a process'
    print(f'base {quant:5} {way:20} {told}', flush=True)
  ratios = [seconds['packed'] / seconds['one after the other'] for seconds in (wall, cpu)]
  told = '{:.2f} of the wall time, {:.2f} of the CPU time'.format(*ratios)
  print(f'base {quant:5} packed to one after the other: {told}', flush=True)


def main() -> None:
  """Runs everything."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--config', default='smollm2_lora')
  parser.add_argument('--trials', type=int, default=8)
  parser.add_argument('--steps', type=int, default=10)
  parser.add_argument('--quant', default='none,nf4', help='of the base, separated by commas')
  options = parser.parse_args()
  print(f'{options.trials} trials of {options.steps} steps of {options.config}')
  print(f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before', flush=True)
  with tempfile.TemporaryDirectory() as folder:
    for quant in options.quant.split(','):
      measure(options, quant, pathlib.Path(folder))
  print(f'load {os.getloadavg()[0]:.1f} after')


if __name__ == '__main__':
  main()

"""Packed trials against processes: `make bench-sweep`.

Eight short trials (learning rates) of one base, three ways: one packed program; fresh processes one
after the other; fresh processes side by side, one per two cores. Prints wall time, compilations of
the step and the highest memory of a process, and the ratio of the first to each of the others.

In pieces, on a machine that is quiet for a few minutes at a time (the ratios come with the last):

  python benchmarks/bench_sweep.py --quant=nf4 --ways=packed --figures=runs/bench_sweep.json
  python benchmarks/bench_sweep.py --quant=nf4 --ways=turns --figures=runs/bench_sweep.json
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
Figures = dict[str, float]

EXPERIMENT = """
import dataclasses
from peftlab.cli import _experiments

def get_config():
  base = _experiments.load({config!r})
  train = dataclasses.replace(
    base.train, steps={steps}, samples=0, sample_tokens=0, checkpoint_every=0, eval_every=0
  )
  data = dataclasses.replace(base.data, length={length}, batch={batch}, eval_rows={eval_rows})
  frozen = dataclasses.replace(base.base, quant={quant!r})
  return dataclasses.replace(base, name='bench', base=frozen, data=data, train=train)

def sweep_lr():
  for i in range({trials}):
    yield {{'train.learning_rate': 1e-4 * 2**i}}
"""
CORES = os.cpu_count() or 1
# {way: (what it is, flags of `peftlab sweep`)}
WAYS = {
  'packed': ('packed', ('--pack=auto',)),
  'turns': ('one after the other', ('--pack=off', '--jobs=1')),
  'beside': ('one per two cores', ('--pack=off', f'--jobs={max(CORES // 2, 1)}')),
}


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


def measure(options: argparse.Namespace, quant: str, way: str, folder: pathlib.Path) -> Figures:
  """Runs one way on one base and prints its line."""
  name, flags = WAYS[way]
  root = folder / f'{quant}-{way}'
  names = ('config', 'trials', 'steps', 'length', 'batch', 'eval_rows')
  values = {key: getattr(options, key) for key in names}
  held = '' if quant == 'none' else quant
  root.with_suffix('.py').write_text(EXPERIMENT.format(**values, quant=held))
  wall, cpu, memory = sweep(root, *flags)
  told = f'{wall:8.1f} s {cpu:8.1f} CPU s  {compiles(root):2} compilations'
  print(f'base {quant:5} {name:20} {told}  {memory:7.0f} MiB in a process', flush=True)
  return {'wall': wall, 'cpu': cpu}


def compare(found: dict[str, Figures], quant: str) -> None:
  """Prints the ratios of packed trials to each other way on a base, as far as both were run."""
  packed = found.get(f'{quant} packed')
  for way, (name, _) in WAYS.items():
    other = found.get(f'{quant} {way}')
    if way == 'packed' or packed is None or other is None:
      continue
    wall, cpu = (packed[key] / other[key] for key in ('wall', 'cpu'))
    told = f'{wall:.2f} of the wall time, {cpu:.2f} of the CPU time'
    print(f'base {quant:5} packed to {name}: {told}', flush=True)


def main() -> None:
  """Runs everything, or what is asked for."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--config', default='smollm2_lora')
  parser.add_argument('--trials', type=int, default=8)
  parser.add_argument('--steps', type=int, default=4)
  parser.add_argument('--length', type=int, default=64, help='tokens of a row')
  parser.add_argument('--batch', type=int, default=1, help='rows of a step')
  parser.add_argument('--eval_rows', type=int, default=4)
  parser.add_argument('--quant', default='none,nf4', help='of the base, separated by commas')
  parser.add_argument('--ways', help=f'of {", ".join(WAYS)}, separated by commas; default: all')
  parser.add_argument('--figures', help='a JSON file that keeps the figures of several runs')
  options = parser.parse_args()
  # On two cores `beside` is `turns` again.
  usual = [way for way in WAYS if way != 'beside' or CORES >= 4]
  ways = options.ways.split(',') if options.ways else usual
  if unknown := [way for way in ways if way not in WAYS]:
    parser.error(f'--ways has {", ".join(unknown)}; expected some of {", ".join(WAYS)}')
  keep = pathlib.Path(options.figures) if options.figures else None
  kept = json.loads(keep.read_text()) if keep and keep.exists() else {}
  size = f'{options.steps} steps of {options.batch} x {options.length} tokens'
  what = f'{options.trials} trials of {size}, {options.config}'
  found = kept.setdefault(what, {})  # others are not compared with these
  print(what)
  print(f'{CORES} cores, load {os.getloadavg()[0]:.1f} before', flush=True)
  with tempfile.TemporaryDirectory() as folder:
    for quant in options.quant.split(','):
      for way in ways:
        found[f'{quant} {way}'] = measure(options, quant, way, pathlib.Path(folder))
        if keep:
          keep.parent.mkdir(parents=True, exist_ok=True)
          keep.write_text(json.dumps(kept))
      compare(found, quant)
  print(f'load {os.getloadavg()[0]:.1f} after')


if __name__ == '__main__':
  main()

"""Runs the benchmarks of quantization, each in a process of its own: `make bench-quant`.

python benchmarks/bench_quant.py [--out=runs/bench_quant] [--rounds=7]
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

from absl import app, flags

OUT = flags.DEFINE_string('out', 'runs/bench_quant', 'Folder for the figures, as JSON.')
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Counted rounds of the CPU steps.', 1)


def main(argv: list[str]) -> None:
  """Runs all, one after the other."""
  del argv
  out = pathlib.Path(OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  here = pathlib.Path(__file__).parent
  runs = {'cpu': ['quant_cpu.py', f'--rounds={ROUNDS.value}'], 'tpu': ['quant_tpu.py']}
  for name, (script, *arguments) in runs.items():
    command = [sys.executable, here / script, *arguments, f'--json={out / name}.json']
    subprocess.run([*command, '--stderrthreshold=error'], check=True)
    print(flush=True)


if __name__ == '__main__':
  app.run(main)

"""Runs every benchmark of the LoRA step, each in processes of its own: `make bench`.

python benchmarks/bench.py [--out=runs/bench]
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

from absl import app, flags

OUT = flags.DEFINE_string('out', 'runs/bench', 'Folder for the figures, one JSON file each.')

RUNS = {
  'step_1': ['lora_step.py', '--devices=1', '--rounds=9'],
  'step_8': ['lora_step.py', '--devices=8', '--rounds=7'],
  'compile': ['compile_time.py'],
  'first_plain': ['first_step.py', '--candidate=plain'],
  'first_1': ['first_step.py'],
  'first_8': ['first_step.py', '--devices=8'],
}


def main(argv: list[str]) -> None:
  """Runs all, one after the other."""
  del argv
  out = pathlib.Path(OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  here = pathlib.Path(__file__).parent
  for name, (script, *arguments) in RUNS.items():
    command = [sys.executable, here / script, *arguments, f'--json={out / name}.json']
    subprocess.run([*command, '--stderrthreshold=error'], check=True)
    print(flush=True)


if __name__ == '__main__':
  app.run(main)

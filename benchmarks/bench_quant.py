"""Runs the benchmarks of quantization, each in a process of its own: `make bench-quant`.

python benchmarks/bench_quant.py [--out=runs/bench_quant] [--rounds=7]
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

from absl import app, flags

OUT = flags.DEFINE_string('out', 'runs/bench_quant', 'Folder for the figures, as JSON.')
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Counted rounds of the CPU steps.', 1)


HEADER = (
  f'{"":18}  bits   error  held out  change  CPU step  forward  backward  temp MB  accessed MB'
)


def table(cpu: dict[str, Any], tpu: dict[str, Any]) -> str:
  """All figures of a quantizer in one line; empty where there is none.

  Args:
    cpu: {quantizer: what quant_cpu measured}.
    tpu: {quantizer, or 'quantizer backward': what quant_tpu was told by the compiler}.
  """
  tpu = {name.replace('bf16', 'f32', 1): row for name, row in tpu.items() if 'kernel' not in name}
  names = dict.fromkeys([*cpu, *(name.removesuffix(' backward') for name in tpu)])
  plain = cpu['f32']['loss']
  return '\n'.join([HEADER, *(_line(name, cpu, tpu, plain) for name in names)])


def _line(name: str, cpu: dict[str, Any], tpu: dict[str, Any], plain: float) -> str:
  one, forward, backward = cpu.get(name, {}), tpu.get(name, {}), tpu.get(f'{name} backward', {})
  columns = (
    (one.get('bits'), 6, 3),
    (one.get('error'), 7, 4),
    (one.get('loss'), 9, 4),
    (one['loss'] - plain if 'loss' in one else None, 7, 4),
    (one.get('ratio'), 9, 3),
    (_millions(forward, 'cycles'), 8, 3),
    (_millions(backward, 'cycles'), 9, 3),
    (_millions(forward, 'temp_bytes'), 8, 1),
    (_millions(forward, 'bytes_accessed'), 12, 1),
  )
  cells = (' ' * w if v is None else f'{v:{w}.{places}f}' for v, w, places in columns)
  return f'{name.replace("f32", "f32, bf16", 1):18}' + ' '.join(cells).rstrip()


def _millions(row: dict[str, float], key: str) -> float | None:
  return row[key] / 1e6 if key in row else None


def main(argv: list[str]) -> None:
  """Runs all, one after the other."""
  del argv
  out = pathlib.Path(OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  here = pathlib.Path(__file__).parent
  runs = {'cpu': ['quant_cpu.py', f'--rounds={ROUNDS.value}'], 'tpu': ['quant_tpu.py']}
  for name, (script, *arguments) in runs.items():
    (out / f'{name}.json').unlink(missing_ok=True)  # of an earlier run
    command = [sys.executable, here / script, *arguments, f'--json={out / name}.json']
    subprocess.run([*command, '--stderrthreshold=error'], check=True)
    print(flush=True)
  found = {name: out / f'{name}.json' for name in runs}
  tpu = json.loads(found['tpu'].read_text()) if found['tpu'].exists() else {'no libtpu': {}}
  (topology, cycles), *_ = tpu.items()
  print(
    'SmolLM2-135M: held-out loss in nats per token, CPU time of a step to that of f32. '
    f'x [2048, 4096] @ w [4096, 14336], {topology}: million cycles, temporaries, bytes.'
  )
  print(table(json.loads(found['cpu'].read_text()), cycles))


if __name__ == '__main__':
  app.run(main)

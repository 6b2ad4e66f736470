"""CPU time of a LoRA step: peftlab against plain JAX, interleaved in one process.

python benchmarks/lora_step.py [--devices=8] [--rounds=7]
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time

from absl import app, flags
import candidates
import jax
import plain_jax

DEVICES = flags.DEFINE_integer('devices', 1, 'CPU devices: 1, or 8 as fsdp 4 x tensor 2.')
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Counted rounds; each runs every candidate once.', 1)
JSON = flags.DEFINE_string('json', None, 'Also write the figures to this file.')

MAKERS = {
  'plain': candidates.plain,
  'plain scan': lambda s, d: candidates.plain(s, d, scan=True),
  'peftlab scan': candidates.ours,
  'peftlab sequential': lambda s, d: candidates.ours(s, d, applier='sequential'),
}


def measure(devices: int, rounds: int) -> dict[str, dict]:
  """{candidate: its figures}: medians of CPU seconds, and of the ratio to plain, round by round."""
  built, rows = {}, {}
  for name, make in MAKERS.items():
    candidate = built[name] = make(plain_jax.SIZES, devices)
    seconds = candidate.compile()
    rows[name] = {
      'loss': candidate.run(),
      'compile_cpu_s': seconds,
      'temp_bytes': candidate.compiled.memory_analysis().temp_size_in_bytes,
      **candidate.facts,
    }
  times: dict[str, list[float]] = {name: [] for name in built}
  order = random.Random(0)
  for _ in range(rounds):
    for name in order.sample(list(built), len(built)):
      start = time.process_time()
      built[name].run()
      times[name].append(time.process_time() - start)
  for name, row in rows.items():
    row['cpu_s'] = statistics.median(times[name])
    ratios = [a / b for a, b in zip(times[name], times['plain'], strict=True)]
    row['ratio'] = statistics.median(ratios)
    row['ratio_range'] = [min(ratios), max(ratios)]
  return rows


def main(argv: list[str]) -> None:
  """Measures and prints."""
  del argv
  candidates.force_devices(DEVICES.value)
  mesh = candidates.mesh_of(DEVICES.value)
  with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
    rows = measure(DEVICES.value, ROUNDS.value)
  head = f'step on {DEVICES.value} devices'
  print(f'{head:20} cpu s   to plain  (range)       temp MB  loss')
  for name, row in rows.items():
    low, high = row['ratio_range']
    print(
      f'{name:20} {row["cpu_s"]:5.2f}   {row["ratio"]:5.2f}     ({low:.2f} to {high:.2f})  '
      f'{row["temp_bytes"] / 1e6:7.0f}  {row["loss"]:.5f}'
    )
  if JSON.value:
    with open(JSON.value, 'w') as file:
      json.dump(rows, file)


if __name__ == '__main__':
  app.run(main)

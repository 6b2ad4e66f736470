"""A fresh process up to its first LoRA step: seconds, peak memory, bytes of the parts.

python benchmarks/first_step.py [--candidate=peftlab|plain] [--devices=8]
"""

from __future__ import annotations

import time

START = time.perf_counter(), time.process_time()

import contextlib
import json
import resource

from absl import app, flags
import candidates
import jax
import plain_jax

CANDIDATE = flags.DEFINE_enum('candidate', 'peftlab', ['peftlab', 'plain'], 'What runs.')
DEVICES = flags.DEFINE_integer('devices', 1, 'CPU devices: 1, or 8 as fsdp 4 x tensor 2.')
JSON = flags.DEFINE_string('json', None, 'Also write the figures to this file.')


def main(argv: list[str]) -> None:
  """Measures and prints."""
  del argv
  imported = time.process_time() - START[1]
  candidates.force_devices(DEVICES.value)
  mesh = candidates.mesh_of(DEVICES.value)
  make = candidates.ours if CANDIDATE.value == 'peftlab' else candidates.plain
  with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
    candidate = make(plain_jax.SIZES, DEVICES.value)
    candidate.compile()
    candidate.run()
  row = {
    'import_cpu_s': imported,
    'first_step_cpu_s': time.process_time() - START[1],
    'first_step_wall_s': time.perf_counter() - START[0],
    'peak_rss_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    **candidate.facts,
  }
  print(
    f'{CANDIDATE.value:8} on {DEVICES.value}: first step after {row["first_step_cpu_s"]:.1f} CPU s '
    f'({row["first_step_wall_s"]:.1f} s), peak memory {row["peak_rss_bytes"] / 1e6:.0f} MB'
  )
  if candidate.facts:
    own, held = row['adapter_bytes'], row['adapter_bytes_on_devices']
    print(f'         adapter {own:,} bytes, on all devices {held:,} ({held / own:.3f} x)')
  if JSON.value:
    with open(JSON.value, 'w') as file:
      json.dump(row, file)


if __name__ == '__main__':
  app.run(main)

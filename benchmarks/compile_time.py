"""Trace and compile time of the LoRA step as layers grow: scan against unrolled.

python benchmarks/compile_time.py [--layers=8,16,32]
"""

from __future__ import annotations

import json

from absl import app, flags
import candidates
import plain_jax

LAYERS = flags.DEFINE_list('layers', ['8', '16', '32'], 'How many layers.')
JSON = flags.DEFINE_string('json', None, 'Also write the figures to this file.')


def main(argv: list[str]) -> None:
  """Measures and prints CPU seconds, tracing included."""
  del argv
  candidates.force_devices(1)
  # The time does not depend on the sizes of the arrays, so small ones do.
  sizes = plain_jax.SIZES | dict(embed=64, heads=4, head_dim=16, mlp=128, vocab=256, length=32)
  rows: dict[str, dict[str, float]] = {}
  for applier in ('scan', 'sequential'):
    rows[applier] = {}
    for layers in LAYERS.value:
      candidate = candidates.ours(sizes | dict(layers=int(layers)), 1, applier=applier)
      rows[applier][layers] = candidate.compile()
  print('trace + compile, CPU s' + ''.join(f'{n + " layers":>12}' for n in LAYERS.value))
  for applier, row in rows.items():
    print(f'peftlab {applier:14}' + ''.join(f'{row[n]:12.1f}' for n in LAYERS.value))
  if JSON.value:
    with open(JSON.value, 'w') as file:
      json.dump(rows, file)


if __name__ == '__main__':
  app.run(main)

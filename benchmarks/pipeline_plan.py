"""A pipeline beside scan on a TPU topology, compiled ahead of time: collectives, memory, ticks.

python benchmarks/pipeline_plan.py [--topology=v5p:2x2x2 --layers=32 --microbatches=8]

Needs the TPU compiler (the extra 'tpu'), no TPU. The figures are the compiler's own, those of loops
times their trips. Defaults: LoRA of rank 8 on Llama 3.1 8B, 16 rows of 2048 tokens, in bfloat16.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from typing import Any

from absl import app, flags
from flax import nnx
import jax

from peftlab import _specs, appliers
from peftlab.models.config import DecoderConfig
from peftlab.models.decoder import Decoder
from peftlab.plan import costs, hlo, program, shapes, topology
from peftlab.plugins.lora import LoRA
from peftlab.train.config import DataConfig, Experiment

TOPOLOGY = flags.DEFINE_string('topology', 'v5p:2x2x2', 'Chips and their shape.')
STAGES = flags.DEFINE_integer('stages', 4, 'Stages of the pipeline.')
BESIDE = flags.DEFINE_enum(
  'beside', 'data', ['data', 'fsdp', 'tensor'], 'The mesh axis beside them, of the other chips.'
)
MICROBATCHES = flags.DEFINE_integer('microbatches', 8, 'Microbatches of the pipeline.')
REPEATS = flags.DEFINE_integer('repeats', 2, 'Repeats of the circular pipeline.')
LAYERS = flags.DEFINE_integer('layers', 32, 'Layers of the model.')
BATCH = flags.DEFINE_integer('batch', 16, 'Rows.')
LENGTH = flags.DEFINE_integer('length', 2048, 'Tokens of a row.')
REMAT = flags.DEFINE_string('remat', 'full', 'What the backward pass recomputes in each layer.')
TEXT = flags.DEFINE_string('text', '', 'Also write the compiled programs to TEXT_<name>.txt.')
ONLY = flags.DEFINE_list('only', [], 'Of scan, plain, circular: those to compile.')


def config() -> DecoderConfig:
  """Llama 3.1 8B."""
  return DecoderConfig(
    family='llama',
    vocab=128_256,
    layers=LAYERS.value,
    embed=4096,
    mlp=14_336,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    max_length=131_072,
    tied=False,
    dtype='bfloat16',
  )


def candidates(chips: int) -> dict[str, tuple[appliers.Applier, dict[str, int]]]:
  """{name: (applier, mesh)}."""
  pipeline = appliers.Pipeline(microbatches=MICROBATCHES.value, rest='last', remat=REMAT.value)
  staged = {'stage': STAGES.value, BESIDE.value: chips // STAGES.value}
  found = {
    'scan': (appliers.Scan(remat=REMAT.value), {'fsdp': chips}),
    'plain': (pipeline, staged),
    'circular': (dataclasses.replace(pipeline, repeats=REPEATS.value), staged),
  }
  return {name: row for name, row in found.items() if name in (ONLY.value or found)}


def compiled(applier: appliers.Applier, mesh: jax.sharding.Mesh) -> program.Compiled:
  """The LoRA step under an applier on a mesh."""
  model = nnx.eval_shape(lambda: Decoder(config(), rngs=nnx.Rngs(0), applier=applier))
  model.lay_out(mesh)
  experiment = Experiment(
    adapter=LoRA(rank=8), data=DataConfig(batch=BATCH.value, length=LENGTH.value)
  )
  placed, _ = shapes.placed(model, mesh)
  return program.compile_step(shapes.shapes(experiment, placed, mesh))


def show(name: str, applier: Any, mesh: jax.sharding.Mesh) -> None:
  """Compiles one candidate and prints its figures."""
  started = time.monotonic()
  made = compiled(applier, mesh)
  if TEXT.value:
    pathlib.Path(f'{TEXT.value}_{name}.txt').write_text(made.text)
  memory, gib = made.memory, 2**30
  print(f'\n{name}: {dict(mesh.shape)}, compiled in {time.monotonic() - started:.0f} s')
  if isinstance(applier, appliers.Pipeline):
    print(f'  {applier.schedule(LAYERS.value, mesh)}')
  print(
    f'  memory per chip: {memory.total / gib:.2f} GiB (arguments {memory.arguments / gib:.2f}, '
    f'temporaries {memory.temporaries / gib:.2f})' + ('' if memory.fits else ', does not fit')
  )
  if not memory.fits:
    return
  total = costs.costs(hlo.parse(made.text), mesh.size)
  print(f'  products {total.flops / 1e12:.1f} Tflop, HBM {total.hbm_bytes / 1e9:.1f} GB per chip')
  print(f'  sent per chip: {total.sent / 1e9:.3f} GB')
  for moved in total.kinds:
    print(
      f'    {moved.kind:20} over {moved.group:2} chips: {moved.count:5} x, '
      f'{moved.payload / 1e9:8.3f} GB payload, {moved.sent / 1e9:8.3f} GB sent'
    )


def main(argv: list[str]) -> None:
  """Prints a block per candidate."""
  del argv
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  missing = topology.missing()
  if missing is not None:
    print(f'Nothing is compiled: {missing}')
    return
  _, devices = topology.devices(TOPOLOGY.value)
  for name, (applier, sizes) in candidates(len(devices)).items():
    show(name, applier, _specs.make_mesh(sizes, devices))


if __name__ == '__main__':
  app.run(main)

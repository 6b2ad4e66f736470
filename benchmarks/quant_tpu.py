"""What the TPU compiler says of quantized matmuls: cycles, temporaries, bytes, ahead of time.

python benchmarks/quant_tpu.py [--topology=v6e:2x4] [--json=FILE]

Needs the package libtpu (of jax[tpu]), and no TPU: x [2048, 4096] @ w [4096, 14336], bfloat16,
tiles of 64, one chip; the product (forward) and its gradient for x (backward).
"""

from __future__ import annotations

from collections.abc import Callable
import importlib.util
import json
import os
import re
import sys
from typing import Any

from absl import app, flags

TOPOLOGY = flags.DEFINE_string('topology', 'v6e:2x4', 'Which chips: v6e:2x4, v5e:2x4, v5p:2x2x1.')
QUANT = flags.DEFINE_list(
  'quant', ['int8', 'int8(tile=64)', 'nf4', 'int4', 'fp8_e4m3', 'mxfp4', 'q4_1'], 'Quantizers.'
)
QWIX = flags.DEFINE_bool('qwix', True, 'Also compile qwix, which takes a minute.')
KERNEL = flags.DEFINE_bool('kernel', True, 'Also compile the Pallas kernel.')
JSON = flags.DEFINE_string('json', None, 'Also write the figures to this file.')

ROWS, INS, OUTS, TILE = 2048, 4096, 14336, 64
# Bytes per second of one chip's memory, Google Cloud's pages of TPU versions.
BANDWIDTH = {'v5e': 819e9, 'v5p': 2765e9, 'v6e': 1640e9}
NO_LIBTPU = (
  'libtpu is not installed, so the TPU figures are left out; everything else was measured. To have '
  "them: pip install 'jax[tpu]', or libtpu of the version that jax[tpu] names into a folder on "
  'PYTHONPATH.'
)


def chip(topology: str) -> Any:
  """A sharding on one chip of a topology, without having it."""
  kind = topology.partition(':')[0]
  defaults = {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': f'{kind}-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
  }
  for name, value in defaults.items():
    os.environ.setdefault(name, value)
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding, PartitionSpec
  import numpy as np

  found = topologies.get_topology_desc(platform='tpu', topology_name=topology)
  return NamedSharding(Mesh(np.array(found.devices[:1]), ('chip',)), PartitionSpec())


def figures(function: Callable[..., Any], arguments: tuple, place: Any) -> dict[str, float]:
  """The compiler's own figures of a function of shapes; of a Pallas kernel it has no cycles.

  Of a program that is nothing but such a kernel it has no bytes either.
  """
  import jax

  shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
  compiled: Any = jax.jit(function).trace(*shapes).lower(lowering_platforms=('tpu',)).compile()
  memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
  cycles = re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text())
  return {
    'cycles': sum(int(c) for c in cycles if int(c) < 2**50),
    'temp_bytes': memory.temp_size_in_bytes,
    'argument_bytes': memory.argument_size_in_bytes,
    'bytes_accessed': cost.get('bytes accessed', 0.0),
  }


def kernel_bytes(arguments: tuple, expand: Callable[..., Any]) -> float:
  """Bytes that the Pallas kernel moves, by its grid: the compiler does not see into it."""
  import jax

  from peftlab.quant import pallas_product

  x, held = arguments
  return float(pallas_product.bytes_moved(x, jax.eval_shape(expand, held)))


def cases() -> dict[str, tuple]:
  """{what: (function, its arguments as shapes; of a Pallas kernel also what expands scales)}."""
  import jax
  import jax.numpy as jnp
  import qwix

  from peftlab import quant
  from peftlab.quant import encoding, pallas_product, product, tiles

  shape = jax.ShapeDtypeStruct
  x, dy = shape((ROWS, INS), jnp.bfloat16), shape((ROWS, OUTS), jnp.bfloat16)
  w = shape((INS, OUTS), jnp.bfloat16)
  found: dict[str, tuple] = {
    'bf16': (lambda x, w: x @ w, (x, w)),
    'bf16 backward': (lambda dy, w: dy @ w.T, (dy, w)),
  }
  for name in QUANT.value:
    chosen = quant.get_quantizer(name)
    options = {'inputs': INS, 'shards': 1, 'name': 'w', 'dimension': 'in'}
    chosen = tiles.settle(chosen, None, **options)
    chosen = chosen.settled('tpu', chosen.tile or INS)
    form = quant.Form(quantizer=chosen, words=('in', 'out'), shape=(INS, OUTS), dtype='bfloat16')
    arrays = encoding.shapes(form)
    for suffix, given, over in (('', x, True), (' backward', dy, False)):
      how = product.How(chosen, None, over)
      found[name + suffix] = (lambda x, a, how=how: product.product(how, x, a), (given, arrays))
    if KERNEL.value:
      given = encoding.shapes(form)
      found[f'{name} kernel'] = (
        lambda x, a, c=chosen: pallas_product.product(c, x, c.expand(a)),
        (x, given),
        chosen.expand,
      )
  if QWIX.value:
    dims = (((1,), (0,)), ((), ()))
    for name, dtype, qtype in (('nf4', jnp.uint4, 'nf4'), ('int8', jnp.int8, jnp.int8)):
      arrays = (shape((INS, OUTS), dtype), shape((INS // TILE, OUTS), jnp.bfloat16))

      def run(x: Any, codes: Any, scales: Any, qtype: Any = qtype) -> Any:
        return qwix.dot_general(x, qwix.QArray(codes, scales, None, qtype), dims)

      found[f'qwix {name}'] = (run, (x, *arrays))
  return found


def main(argv: list[str]) -> None:
  """Compiles and prints."""
  del argv
  if importlib.util.find_spec('libtpu') is None:
    print(NO_LIBTPU)
    sys.exit(0)
  place = chip(TOPOLOGY.value)
  rows = {}
  bandwidth = BANDWIDTH[TOPOLOGY.value.partition(':')[0]]
  print(f'{TOPOLOGY.value:22} M cycles  temp MB  accessed MB  us at bandwidth  arguments MB')
  for name, (function, arguments, *kernel) in cases().items():
    row = rows[name] = figures(function, arguments, place)
    cycles = f'{row["cycles"] / 1e6:8.3f}'
    if kernel:
      cycles, row['bytes_accessed'] = f'{"-":>8}', kernel_bytes(arguments, *kernel)
    row['memory_us'] = row['bytes_accessed'] / bandwidth * 1e6
    print(
      f'{name:22} {cycles}  {row["temp_bytes"] / 1e6:7.1f}  '
      f'{row["bytes_accessed"] / 1e6:11.1f}  {row["memory_us"]:15.0f}  '
      f'{row["argument_bytes"] / 1e6:12.1f}',
      flush=True,
    )
  if JSON.value:
    with open(JSON.value, 'w') as file:
      json.dump({TOPOLOGY.value: rows}, file, indent=1)


if __name__ == '__main__':
  app.run(main)

"""Bytes that each adapter adds to a shared base: gemma2-2b with 2 layers on 8 devices.

python benchmarks/base_sharing.py [--bases=bfloat16,int8,nf4 --appliers=scan,...]

For every base and way to run its layers, two adapters of rank 16 on all linear layers are attached
to it and run. Printed: the bytes of all live arrays that each added, the bytes of its own arrays,
and how many base arrays are the same objects in both. Asserted: the two numbers are equal, every
array is shared, and the output is bitwise that of a base of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import gc
import os
from typing import Any

from absl import app, flags
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

import peftlab
from peftlab import _parts, _specs, _stack, appliers, quant
from peftlab.models import sizes
from peftlab.models.decoder import Decoder
from peftlab.plugins.lora import LoRA

BASES = flags.DEFINE_list('bases', ['bfloat16', 'int8', 'nf4'], 'How the base is held.')
APPLIERS = flags.DEFINE_list(
  'appliers', ['scan', 'sequential', 'scan axis 1', 'pipeline'], 'How the layers are run.'
)
SIZE = flags.DEFINE_string('size', 'gemma2-2b', 'A named size.')
LAYERS = flags.DEFINE_integer('layers', 2, 'Layers of it.')
RANK = flags.DEFINE_integer('rank', 16, 'Of the adapters.')

MIB = 2**20
TILE = 64  # divides into parts for every mesh axis, so that codes are sharded as the weight was


def mesh_of(applier: str) -> jax.sharding.Mesh:
  """fsdp 4 x tensor 2; a pipeline has 2 stages of fsdp 2 x tensor 2."""
  if applier == 'pipeline':
    return _specs.make_mesh({'stage': 2, 'fsdp': 2, 'tensor': 2})
  return _specs.make_mesh({'fsdp': 4, 'tensor': 2})


def build(applier: str, mesh: jax.sharding.Mesh) -> nnx.Module:
  """The model with random weights, made where they lie."""
  config = sizes.config(SIZE.value, dtype='bfloat16')
  count = LAYERS.value
  config = dataclasses.replace(config, layers=count, windows=config.windows[:count])
  run = appliers.Pipeline(microbatches=2) if applier == 'pipeline' else None
  run = run or appliers.get_applier(applier.split()[0])
  model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), applier=run))
  if applier.endswith('axis 1'):
    model.layers = along_axis_1(model.layers)
  where, _ = _specs.shardings(model, mesh)
  parts, arrays = _parts.split(model), {}
  for seed, (path, shape) in enumerate(_parts.flat(parts.base).items()):
    arrays[path] = random_array(seed, shape, where[path])
  return _parts.merge(parts.replace(base=_parts.nest(arrays)))


def random_array(seed: int, shape: Any, sharding: NamedSharding) -> jax.Array:
  """Small random numbers, each device's own part made on its own."""
  if not jnp.issubdtype(shape.dtype, jnp.inexact):
    return jax.device_put(jnp.zeros(shape.shape, shape.dtype), sharding)

  def part(index: Any) -> Any:
    starts = [s.start or 0 for s in index]
    own = [len(range(*s.indices(n))) for s, n in zip(index, shape.shape, strict=True)]
    rng = np.random.default_rng([seed, *starts])
    return (rng.random(own, np.float32) * 0.04 - 0.02).astype(shape.dtype)

  return jax.make_array_from_callback(shape.shape, sharding, part)


def along_axis_1(layers: nnx.Module) -> nnx.Module:
  """A stack of shapes with its layer axis at 1, where an array has so many."""
  parts = _parts.split(layers)
  for path, variable in _parts.variables(layers).items():
    _stack.remove_axis(variable, 0, len(_parts.flat(parts.base)[path].shape))
  bare = _parts.split(layers)
  return nnx.eval_shape(lambda p: _parts.merge(_stack.move_in(p, axis=1, name='layers')), bare)


def live_bytes() -> int:
  """Bytes of all arrays that are alive, on all devices together."""
  gc.collect()
  return peftlab.nbytes(jax.live_arrays())


def with_own_base(parts: _parts.Parts) -> _parts.Parts:
  """The same with a copy of every array of the layers."""
  layers = jax.tree.map(lambda a: jax.device_put(jnp.copy(a), a.sharding), parts.base['layers'])
  return parts.replace(base=parts.base | {'layers': layers})


def attached(base: nnx.Module, seed: int) -> _parts.Parts:
  """An adapter on the base whose two factors are both random."""
  parts = peftlab.split(peftlab.attach(base, LoRA(rank=RANK.value), rngs=seed)[0])
  keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(parts.adapter))))

  def noisy(a: jax.Array) -> jax.Array:
    noise = jax.random.normal(next(keys), a.shape, a.dtype) * 0.1
    return jax.device_put(a + noise.astype(a.dtype), a.sharding)

  return parts.replace(adapter=jax.tree.map(noisy, parts.adapter))


def measure(base: nnx.Module, mesh: jax.sharding.Mesh) -> Iterator[tuple[int, int, str, str]]:
  """(bytes added, bytes of its own, base arrays shared, output) of two adapters in turn."""
  compiled = 0

  def counted(parts: _parts.Parts, tokens: jax.Array) -> jax.Array:
    nonlocal compiled
    compiled += 1
    model: Any = _parts.merge(parts)
    return model.hidden(tokens)

  forward = jax.jit(counted)
  rows = NamedSharding(mesh, PartitionSpec('fsdp'))
  tokens = jax.device_put(np.arange(32, dtype=np.int32).reshape(4, 8), rows)
  held = [attached(base, 0)]
  with jax.set_mesh(mesh):
    forward(held[0], tokens).block_until_ready()  # what compiling leaves behind
    held.clear()
    for seed in (1, 2):
      before = live_bytes()
      held.append(attached(base, seed))
      y = np.asarray(forward(held[-1], tokens).astype(jnp.float32))
      added, own = live_bytes() - before, peftlab.nbytes(held[-1].adapter)
      alone = np.asarray(forward(with_own_base(held[-1]), tokens).astype(jnp.float32))
      assert np.isfinite(y).all()
      assert y.tobytes() == alone.tobytes(), 'the output is not that of a base of its own'
      yield added, own, peftlab.assert_base_shared(base, held[-1]), 'bitwise equal'
  assert compiled == 1, 'another adapter was compiled anew'


def main(argv: list[str]) -> None:
  """Prints a line per base, applier and adapter."""
  del argv
  os.environ['JAX_PLATFORMS'] = 'cpu'
  jax.config.update('jax_num_cpu_devices', 8)
  print(
    f'{"base":9} {"layers run by":12} {"adapter":>7} {"added":>9} {"its own":>9}  shared  output'
  )
  for applier in APPLIERS.value:
    mesh = mesh_of(applier)
    plain: nnx.Module = build(applier, mesh)
    base = plain
    for kind in BASES.value:
      base = plain if kind == 'bfloat16' else quant.quantize(plain, kind, tile=TILE)[0]
      size = peftlab.nbytes(base)
      jax.clear_caches()
      for number, (added, own, shared, output) in enumerate(measure(base, mesh), 1):
        print(
          f'{kind:9} {applier:12} {number:7} {added / MIB:5.1f} MiB {own / MIB:5.1f} MiB  '
          f'{shared:6}  {output} (base {size / MIB:.0f} MiB)',
          flush=True,
        )
        assert added == own
    del plain, base


if __name__ == '__main__':
  app.run(main)

"""1.2, 2.1, 2.3, 4.2: quantizers x appliers on Auto and Explicit meshes, and stacks of experts."""

import functools
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs, quant
from peftlab.models.experts import ExpertDense
from peftlab.plugins.lora import LoRA
from peftlab.train.opt_state import combine, partition
from tests.quant import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')

TILES = {'int8': 16, 'nf4': 16, 'int4': 16, 'q4_1': 32}
SIZES = (2, 4)
LAYERS = ('q', 'up')  # their 64 inputs give fsdp 2 whole tiles of each quantizer


def mesh_of(kind=AxisType.Auto, names=('fsdp', 'tensor'), sizes=SIZES):
  return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


@functools.cache
def adapted(name, kind):
  """Parts on a mesh (None: one device), quantized there, the adapter's numbers always the same."""
  model = tiny.Model()
  if kind is not None:
    model = _specs.place(model, mesh_of(kind))[0]
  held, report = quant.quantize(model, name, tile=TILES[name])
  lost = [d.path for d in report.dropped if 'group_scales' not in d.path]
  assert not [path for path in lost if path.split('.')[1] in LAYERS]
  return tiny.randomized(peftlab.split(peftlab.attach(held, LoRA(rank=2), where=LAYERS)[0]))


def compiled(parts, applier, mesh):
  """(the program of loss and adapter gradients, what it takes)."""
  trained, frozen = partition(parts)

  def loss(trained, frozen, base):
    return tiny.loss(parts, combine(trained, frozen), applier, base)

  run = jax.value_and_grad(loss)
  if mesh is not None and AxisType.Explicit in mesh.axis_types:
    where = jax.tree.map(lambda a: a.sharding, trained)
    run = jax.sharding.auto_axes(run, out_sharding=(NamedSharding(mesh, P()), where))
  given = (trained, frozen, parts.base)
  with _specs.using(mesh):
    return jax.jit(run).lower(*given).compile(), given


@functools.cache
def on_one_device(name):
  program, given = compiled(adapted(name, None), 'scan', None)
  return jax.device_get(program(*given))


A, E = AxisType.Auto, AxisType.Explicit
PROGRAMS = (
  ('int8', 'scan', A), ('int8', 'sequential', E), ('nf4', 'scan', E), ('nf4', 'sequential', A),
  ('int4', 'scan', A), ('int4', 'sequential', E), ('q4_1', 'scan', E), ('q4_1', 'sequential', A),
)  # fmt: skip


@pytest.mark.parametrize(('name', 'applier', 'kind'), PROGRAMS)
def test_codes_are_gathered_and_results_are_those_of_one_device(name, applier, kind):
  """Loss and adapter gradients; no kernel in numbers travels."""
  program, given = compiled(adapted(name, kind), applier, mesh_of(kind))
  chex.assert_trees_all_close(
    jax.device_get(program(*given)), on_one_device(name), rtol=2e-3, atol=1e-5
  )
  gathered = re.findall(r'= \(?(\w+)\[([\d,]*)\]\S* all-gather', program.as_text())
  sizes = [(t, np.prod([int(n) for n in shape.split(',') if n])) for t, shape in gathered]
  kernel = tiny.EMBED * tiny.EMBED // SIZES[1]  # of one layer, what a tensor shard reads
  assert max(s for t, s in sizes if t in ('s4', 's8', 'u8')) >= kernel // 2  # 2 codes in a byte
  assert not [s for t, s in sizes if t in ('f32', 'bf16', 'f16') and s >= kernel]


# On fsdp 4 x tensor 2: what a scale per channel, or 2 tiles over fsdp 4, could keep says nothing
# of the kernel [64, 4 heads, 16], so each factor lies over all 8 devices as without codes.
@pytest.mark.parametrize(('name', 'tile'), (('int8', 0), ('int8', 32), ('nf4', 32)))
def test_factors_lie_as_those_of_the_kernel_in_numbers(name, tile):
  mesh = mesh_of(sizes=(4, 2))
  placed = _specs.place(tiny.Model(), mesh)[0]
  held = quant.quantize(placed, name, tile=tile)[0]
  trees = [_parts.split(peftlab.attach(m, LoRA(rank=2))[0]).adapter for m in (placed, held)]
  specs = [{p: a.sharding.spec for p, a in _parts.flat(tree).items()} for tree in trees]
  assert specs[1] == specs[0]
  assert specs[1]['layers', 'q', 'adapters', 0, 'a'] == P(None, ('fsdp', 'tensor'), None)
  for path, array in _parts.flat(trees[1]).items():
    if path[-1] in ('a', 'b') and path[1] != 'down':  # which has no logical axes
      assert _parts.nbytes(array) == array.nbytes


def test_codes_of_one_tile_are_cut_inside_it():
  """int8 per channel: codes [1 tile, 64, 4, 16] over fsdp and tensor, scales [1, 4, 16] over it."""
  mesh = mesh_of(sizes=(4, 2))
  held, report = quant.quantize(_specs.place(tiny.Model(), mesh)[0], 'int8', tile=0, where='q')
  value = held.layers.q.kernel.get_raw_value()
  assert {n: a.sharding.spec for n, a in value.arrays.items()} == {
    'codes': P(None, None, 'fsdp', 'tensor', None),
    'scales': P(None, None, 'tensor', None),
  }
  assert not report.dropped
  assert value.sharding.spec == P(None, 'fsdp', 'tensor', None)
  alone = quant.quantize(tiny.Model(), 'int8', tile=0, where='q')[0].layers.q.kernel
  chex.assert_trees_all_close(jax.device_get(value), jax.device_get(alone.get_raw_value()))


EXPERTS = 4


class Experts(nnx.Module):
  """x + down(tanh(up(x))), rows sorted by expert."""

  def __init__(self, rngs):
    self.up = ExpertDense(EXPERTS, {'embed': 32}, {'mlp': 64}, rngs=rngs, bias=True)
    self.down = ExpertDense(EXPERTS, {'mlp': 64}, {'embed': 32}, rngs=rngs)

  def __call__(self, x, sizes):
    return x + self.down(jnp.tanh(self.up(x, sizes)), sizes)


@pytest.mark.parametrize(('name', 'tile'), (('int8', 0), ('nf4', 16), ('mxfp4', 32)))
def test_a_stack_of_experts(name, tile):
  """Outputs and adapter gradients equal those on the base in numbers, on an expert axis too."""
  model = Experts(nnx.Rngs(0))
  mesh = mesh_of(names=('expert', 'fsdp'), sizes=(4, 2))
  x, sizes = jax.random.normal(jax.random.key(1), (11, 32)), jnp.asarray([3, 0, 6, 2])

  def results(model, where):
    parts = tiny.randomized(peftlab.split(peftlab.attach(model, LoRA(rank=2))[0]))
    trained, frozen = partition(parts)

    def loss(trained, base):
      whole = parts.replace(adapter=combine(trained, frozen), base=base)
      y = peftlab.merge(whole)(x, sizes)
      return (y * y).mean(), y

    with _specs.using(where):
      return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(trained, parts.base))

  alone = quant.quantize(model, name, tile=tile)[0]
  held, report = quant.quantize(_specs.place(model, mesh)[0], name, tile=tile)
  assert not [d for d in report.dropped if d.axis == 'expert']
  codes = held.up.kernel.get_raw_value().arrays['codes']
  assert codes.sharding.spec[0] == 'expert'
  assert codes.shape[0] == EXPERTS
  adapter = peftlab.split(peftlab.attach(held, LoRA(rank=2))[0]).adapter
  assert adapter['up']['adapters'][0]['a'].sharding.spec[0] == 'expert'
  expected = results(quant.dequantize(alone), None)
  for found in (results(alone, None), results(held, mesh)):
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)

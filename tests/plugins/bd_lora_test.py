"""BD-LoRA: under tensor parallelism the compiled text has no collective that the base has not."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import pytest

import peftlab
from peftlab import _parts, _specs
from peftlab.plugins.bd_lora import BDLoRA
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases
from peftlab.testing import models

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_ranks')

COLLECTIVES = 'all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute'
DEVICES = 8


def collectives(model, x):
  """The kinds of the collectives of a forward pass as it was compiled, in order."""
  text = jax.jit(lambda parts, x: _parts.merge(parts)(x)).lower(peftlab.split(model), x)
  return re.findall(rf' ({COLLECTIVES})(?:-start)?\(', text.compile().as_text())


@pytest.fixture(scope='module', name='placed')
def place():
  mesh = _specs.make_mesh({'tensor': DEVICES})
  block = models.Block((16, 32), rngs=nnx.Rngs(0))
  x = jax.device_put(jnp.ones((4, 16)), NamedSharding(mesh, PartitionSpec()))
  return _specs.place(block, mesh)[0], x


def bd(side):
  return BDLoRA(rank=16, blocks=DEVICES, side=side)


def test_no_collective_is_added(placed):
  block, x = placed
  base = collectives(block, x)
  assert len(base) == 1  # the row-parallel layer's sum
  model, report = peftlab.attach(block, {'up': bd('out'), 'down': bd('in')})
  assert not report.dropped
  assert collectives(model, x) == base


@pytest.mark.parametrize(('name', 'side'), (('up', 'out'), ('down', 'in')))
def test_each_layer_alone_has_what_its_base_has(placed, name, side):
  block, _ = placed
  layer = getattr(block, name)
  x = jnp.ones((4, layer.in_features))
  spec = PartitionSpec(None, 'tensor' if name == 'down' else None)
  x = jax.device_put(x, NamedSharding(layer.kernel[...].sharding.mesh, spec))
  model, _ = peftlab.attach(layer, bd(side))
  assert collectives(model, x) == collectives(layer, x) == ['all-reduce'] * (name == 'down')


def test_the_blocks_are_those_of_a_lora_with_zeros(placed):
  block, x = placed
  model, _ = peftlab.attach(block, {'up': bd('out'), 'down': bd('in')})
  parts = cases.randomized(peftlab.split(model))
  y = cases.forward(parts, x)
  held = peftlab.merge(parts)
  plain, _ = peftlab.attach(models.Block((16, 32), rngs=nnx.Rngs(0)), LoRA(rank=16))
  for name in ('up', 'down'):
    p, q = (getattr(m, name).adapters[0] for m in (held, plain))
    a, b = p.a[...], p.b[...]
    per = 16 // DEVICES
    rows = jnp.arange(16)
    if name == 'down':
      owner = jnp.arange(a.shape[0]) // (a.shape[0] // DEVICES)
      mask = owner[:, None] == rows[None, :] // per
      a = jnp.where(mask, jnp.tile(a, (1, DEVICES)), 0.0)
    else:
      owner = jnp.arange(b.shape[1]) // (b.shape[1] // DEVICES)
      mask = rows[:, None] // per == owner[None, :]
      b = jnp.where(mask, jnp.tile(b, (DEVICES, 1)), 0.0)
    for variable, value in ((q.a, a), (q.b, b), (q.scale, p.scale[...])):
      variable[...] = jax.device_get(value)
  expected = cases.forward(peftlab.split(plain), jax.device_get(x))
  cases.assert_close(y, expected, 'BD-LoRA against LoRA with zeros between the blocks')

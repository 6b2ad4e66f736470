"""Every adapter type on three kinds of codes at once, each under one applier and on one mesh.

The ways below go around the types, so that each applier and each mesh meets a quarter of them; an
adapter under all appliers on all meshes is the conformance suite's matter, on a base in numbers.
"""

import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import peftlab
from peftlab import _registry, _specs, quant
from peftlab.appliers import Pipeline
from peftlab.testing import case
from tests.quant import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_promotion')

# One program has them all. The other quantizers differ from these in their codebook alone.
CODES = {'q': ('nf4', 16), 'o': ('int8', 0), 'up': ('q4_1', None), 'down': ('mxfp4', None)}
BY_TWO = {'fsdp': 4, 'tensor': 2}
WAYS = (  # applier, mesh, its kind
  ('scan', None, None),
  ('sequential', BY_TWO, AxisType.Auto),
  (Pipeline(microbatches=2), {'stage': 3}, AxisType.Auto),
  ('scan', BY_TWO, AxisType.Explicit),
)
# qwix_lora quantizes by itself; types on points meet no weight.
ADAPTERS = tuple(
  n for n in peftlab.adapter_types() if n != 'qwix_lora' and not _registry.adapters.get(n).point
)
# What a type cannot have: a bias where there is none, whole blocks of 24 numbers.
WHERE = {'bias': ('q', 'up'), 'bd_lora': ('q',)}


@pytest.fixture
def usual_promotion():
  """JAX's own setting, for which adapters are written."""
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
    yield


def mesh_of(way):
  applier, shape, kind = WAYS[way]
  del applier
  if shape is None:
    return None
  devices = jax.devices()[: int(np.prod([*shape.values()]))]
  types = (kind,) * len(shape)
  return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=devices)


@functools.cache
def base(way):
  """The tiny model, each of its layers in codes of another kind."""
  model, mesh = tiny.Model(), mesh_of(way)
  if mesh is not None:
    model = _specs.place(model, mesh)[0]
  for layer, (name, tile) in CODES.items():
    model = quant.quantize(model, name, tile=tile, where=layer)[0]
  return model


def attached(way, name):
  adapter = case.sized(_registry.adapters.get(name))
  fourth = ADAPTERS.index(name) % 4 == 3  # of the types also on the slowest codes to decode
  where = WHERE.get(name, tuple(CODES)[: 4 if fourth else 3])
  model, _ = peftlab.attach(base(way), adapter, where=where)
  peftlab.assert_base_shared(base(way), model)
  made = peftlab.merge(tiny.randomized(peftlab.split(model)))
  made.eval()
  return made


@pytest.mark.parametrize('name', ADAPTERS)
def test_an_adapter_on_codes_equals_it_on_their_numbers(name):
  """On a mesh, under an applier; the numbers on one device, under scan."""
  way = ADAPTERS.index(name) % len(WAYS)
  applier, _, kind = WAYS[way]
  mesh = mesh_of(way)

  def run(parts):
    return peftlab.merge(parts)(tiny.TOKENS, applier)

  if kind is AxisType.Explicit:
    run = jax.sharding.auto_axes(run, out_sharding=NamedSharding(mesh, P()))
  with _specs.using(mesh):
    y = jax.jit(run)(peftlab.split(attached(way, name)))
  plain = peftlab.split(quant.dequantize(attached(0, name)))
  expected = jax.jit(lambda p: peftlab.merge(p)(tiny.TOKENS, 'scan'))(plain)
  assert bool(jnp.isfinite(y).all())
  chex.assert_trees_all_close(jax.device_get(y), jax.device_get(expected), rtol=1e-3, atol=1e-5)

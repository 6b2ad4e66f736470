"""1.2, 2.1: on meshes, each array from its own shape; codes are what FSDP gathers."""

import re

import chex
import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs, quant
from peftlab.plugins.lora import LoRA
from peftlab.quant import saved
from tests.quant import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
  return jax.make_mesh((4, 2), ('fsdp', 'tensor'), axis_types=(kind,) * 2)


@pytest.fixture(scope='module')
def reference():
  return quant.quantize(tiny.Model(), 'nf4', tile=16)[0]


@pytest.fixture(scope='module')
def sharded():
  return quant.quantize(_specs.place(tiny.Model(), mesh_of())[0], 'nf4', tile=16)


SPECS = {  # of kernels with axes (layers, embed, q_heads, head_dim) on fsdp 4 x tensor 2
  'codes': P(None, 'fsdp', None, 'tensor', None),
  'scales': P(None, 'fsdp', 'tensor', None),
  'group_scales': P(None, 'fsdp', None),
  'mean': P(None),
}


@pytest.mark.parametrize('kind', (AxisType.Auto, AxisType.Explicit))
def test_encoding_keeps_every_mesh_axis(kind, reference):
  mesh = mesh_of(kind)
  parts = _parts.split(_specs.place(tiny.Model(), mesh_of())[0])
  base = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, a.sharding.spec)), parts.base)
  model, report = quant.quantize(_parts.merge(parts.replace(base=base)), 'nf4', tile=16)
  held = model.layers.q.kernel.get_raw_value()
  assert {n: a.sharding.spec for n, a in held.arrays.items()} == SPECS
  assert all(a.sharding.mesh.axis_types == mesh.axis_types for a in held.arrays.values())
  for one, other in zip(
    jax.tree.leaves(held), jax.tree.leaves(reference.layers.q.kernel), strict=True
  ):
    np.testing.assert_allclose(
      np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-6
    )
  row = next(r for r in report.rows if r.path == 'layers.q')
  assert row.device_bytes == 3 * (4096 // 2 // 8 + 256 // 8 + 4 * 4 // 4 + 4)
  assert [str(d).partition(':')[0] for d in report.dropped if 'q.' in str(d)] == [
    'layers.q.kernel.group_scales'
  ]


@pytest.mark.parametrize('name', ('int8', 'nf4(tile=16)'))
def test_numbers_that_are_not_finite_are_counted_once_over_devices(name):
  bad = _specs.place(tiny.spoiled(tiny.Model(), np.nan), mesh_of())[0]
  with pytest.raises(ValueError, match=r'layers\.o\.kernel of shape .* holds 3 numbers that are'):
    quant.quantize(bad, name)


def test_metadata_and_placement_agree(sharded):
  held = sharded[0].layers.q.kernel.get_raw_value()
  told = _specs.shardings(sharded[0], mesh_of())[0]['layers', 'q', 'kernel']
  assert {n: s.spec for n, s in told.arrays.items()} == SPECS
  assert held.sharding.spec == P(None, 'fsdp', 'tensor', None)


def test_a_tile_count_below_the_axis_works():
  """2 tiles over fsdp 4: the codes lose that axis, are said to, and the rest stays."""
  placed = _specs.place(tiny.Model(), mesh_of())[0]
  held, report = quant.quantize(placed, 'int8', tile=32, where='q')
  arrays = held.layers.q.kernel.get_raw_value().arrays
  assert arrays['codes'].sharding.spec == P(None, None, None, 'tensor', None)
  assert {d.path for d in report.dropped} == {
    'layers.q.kernel.codes', 'layers.q.kernel.scales'
  }  # fmt: skip
  automatic, report = quant.quantize(placed, 'int8(tile=32)', tile='auto', where='q')
  assert report.rows[0].tile == 16
  assert '16 (asked: 32)' in report.table()
  assert not report.dropped
  spec = automatic.layers.q.kernel.get_raw_value().arrays['scales'].sharding.spec
  assert spec == P(None, 'fsdp', 'tensor', None)


@pytest.mark.parametrize('applier', ('scan', 'sequential'))
def test_qlora_on_a_mesh_gathers_codes_and_equals_one_device(sharded, reference, applier):
  results = []
  for base, mesh in ((reference, None), (sharded[0], mesh_of())):
    parts = peftlab.split(peftlab.attach(base, LoRA(rank=2))[0])
    parts = tiny.randomized(parts)
    with _specs.using(mesh):
      step = jax.jit(
        jax.value_and_grad(lambda a, b, p=parts: tiny.loss(p, a, applier, b)),
      )
      compiled = step.lower(parts.adapter, parts.base).compile()
      results.append(jax.device_get(compiled(parts.adapter, parts.base)))
  chex.assert_trees_all_close(*results, rtol=2e-3, atol=1e-5)
  gathered = re.findall(r'= \(?(\w+)\[([\d,]*)\]\S* all-gather', compiled.as_text())
  assert any(dtype in ('s4', 's8', 'u8') for dtype, _ in gathered)
  kernel = min(tiny.EMBED * tiny.EMBED, tiny.EMBED * 96)
  floats = [(d, s) for d, s in gathered if d in ('f32', 'bf16', 'f16')]
  assert not [s for _, s in floats if np.prod([int(n) for n in s.split(',') if n]) >= kernel // 2]


def test_a_saved_base_is_restored_bitwise_on_another_mesh(sharded, tmp_path):
  saved.save(sharded[0], tmp_path / 'base', source='tiny')
  other = jax.make_mesh((2, 4), ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2)
  outline = _parts.merge(
    (p := _parts.split(tiny.Model())).replace(
      base=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), p.base)
    )
  )
  back = saved.load(outline, tmp_path / 'base', mesh=other, source='tiny')
  assert _parts.split(back).graph == _parts.split(sharded[0]).graph
  for one, two in zip(
    *(jax.tree.leaves(_parts.split(m).base) for m in (back, sharded[0])), strict=True
  ):
    assert one.sharding.mesh == other
    assert one.dtype == two.dtype
    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
  with pytest.raises(ValueError, match="holds a base of 'tiny'"):
    saved.load(outline, tmp_path / 'base', source='other')
  with pytest.raises(ValueError, match='holds no saved base'):
    saved.load(outline, tmp_path / 'nothing')
  with pytest.raises(ValueError, match='is not empty'):
    saved.save(sharded[0], tmp_path / 'base')


def test_adapters_share_a_quantized_base(sharded):
  first, report = peftlab.attach(sharded[0], LoRA(rank=2))
  second, _ = peftlab.attach(sharded[0], LoRA(rank=2), rngs=1)
  peftlab.assert_base_shared(sharded[0], first)
  peftlab.assert_base_shared(sharded[0], second)
  trees = [peftlab.split(m) for m in (first, second)]
  grown = peftlab.nbytes([t.base for t in trees]) - peftlab.nbytes(trees[0].base)
  assert grown == 0
  assert report.trainable > 0

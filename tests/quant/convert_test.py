"""1.3, 1.4, 4.3: quantize and what holds of the model: report, tiles, lookups, adapters, merges."""

import dataclasses
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import fuse, quant
from peftlab._registry import quantizers
from peftlab.plugins.lora import LoRA
from peftlab.quant import layer, tiles
from tests.quant import tiny

MADE = tuple(n for n in quantizers.names() if n not in ('q4_k', 'q6_k'))
# Tiles that divide 64 and 96, for those that can have any.
OPTIONS = {n: None if quantizers.get(n).exact_tile else 16 for n in MADE}


@pytest.fixture(scope='module')
def model():
  return tiny.Model()


@pytest.fixture(scope='module')
def nf4(model):
  return quant.quantize(model, 'nf4', tile=16)[0]


def test_other_arrays_are_shared_and_the_model_given_is_untouched(model, nf4):
  before, after = (peftlab.split(m).base for m in (model, nf4))
  assert after['embed']['table'] is before['embed']['table']
  assert after['layers']['q']['bias'] is before['layers']['q']['bias']
  assert isinstance(before['layers']['q']['kernel'], jax.Array)
  assert isinstance(after['layers']['q']['kernel'], quant.Quantized)
  assert peftlab.split(peftlab.merge(peftlab.split(nf4))).graph == peftlab.split(nf4).graph


def test_the_layout_is_codes_and_scales_with_layers_first(nf4):
  held = nf4.layers.o.kernel.get_raw_value()
  assert jax.tree.map(lambda a: (str(a.dtype), a.shape), held.arrays) == {
    'codes': ('uint8', (3, 4, 8, 64)),  # [layers, tiles, half a tile: two in a byte, out]
    'scales': ('int8', (3, 4, 64)),
    'group_scales': ('float32', (3, 4, 1)),
    'mean': ('float32', (3,)),
  }
  assert held.shape == (3, 4, 16, 64)  # the weight's own: [layers, heads, head_dim, embed]
  assert nf4.layers.q.kernel.get_raw_value().arrays['codes'].shape == (3, 4, 8, 4, 16)
  on_tpu = quant.get_quantizer('nf4').settled('tpu', 64)
  assert on_tpu.held == 'int4'


def test_the_report_counts_bits_and_bytes(model):
  _, report = quant.quantize(model, 'q4_1', exclude=('up', 'down'))
  assert [row.path for row in report.rows] == ['layers.o', 'layers.q']
  assert report.bits == 5.0
  assert report.rows[0].nbytes == 3 * 64 * 64 * 5 // 8
  assert '5.000 bits per weight' in report.table()


def test_embeddings_and_heads_are_left_alone_unless_named(model):
  assert 'embed' not in [r.path for r in quant.quantize(model, 'int8')[1].rows]
  held, report = quant.quantize(model, 'int8', where='embed')
  assert [r.path for r in report.rows] == ['embed']
  plain = quant.dequantize(held)
  index = jnp.asarray([3, 47, 99], jnp.int32)
  chex.assert_trees_all_equal(held.embed(index)[:2], plain.embed(index)[:2])
  assert bool(jnp.isnan(held.embed(index)[2]).all())  # as a table in numbers does
  chex.assert_trees_all_close(held(tiny.TOKENS), plain(tiny.TOKENS), rtol=1e-5, atol=1e-6)


def test_a_lookup_decodes_its_rows_alone(model):
  held = quant.quantize(model, 'q8_0', where='embed')[0]
  parts = peftlab.split(held.embed)
  text = str(jax.make_jaxpr(lambda p, i: peftlab.merge(p)(i))(parts, tiny.TOKENS))
  assert 'f32[64,48]' not in text
  assert 'f32[2,32,48]' not in text  # [tiles, tile, vocab]


def test_single_numbers_can_be_read(nf4):
  index = tuple(jnp.asarray(i) for i in ([0, 2], [3, 1], [15, 2], [63, 0]))
  held = nf4.layers.o.kernel.get_raw_value()
  chex.assert_trees_all_equal(held[index], held.dense()[index])


@pytest.mark.parametrize(
  ('options', 'message'),
  (
    (
      {'tile': 48},
      r"layers.o.kernel: the tile 48 of nf4 does not divide the dimension 'in' \(64\)",
    ),
    ({'tile': 48}, r'Tiles that would: 8, 16, 32, 0 \(all of them\)'),
    ({'tile': 'atuo'}, "tile is 'atuo'; expected a number"),
    ({'tile': 32.0}, r'nf4 has tile=32\.0; expected a number of inputs, or 0 for all of them'),
    ({'tile': True}, 'nf4 has tile=True; expected a number of inputs, or 0 for all of them'),
    ({'tile': np.float32(32)}, 'expected a number of inputs, or 0 for all of them'),
    ({'where': 'qq'}, "where='qq' matches no layer"),
  ),
)
def test_a_tile_that_cannot_work_is_told(model, options, message):
  with pytest.raises(ValueError, match=message):
    quant.quantize(model, 'nf4', **({'where': 'o'} | options))


# (inputs, quantizer, tile) -> what is advised: of 128 8, 16, 32 and 64 divide, of 33 3 and 11, of 7
# none; 'auto' takes 8 or more, and no more than the quantizer's own tile.
ADVICE = (
  (128, 'nf4(tile=7)', None, 'Tiles that would: 8, 16, 32, 64, 0 (all of them).'),
  (128, 'nf4', 48, "Tiles that would: 8, 16, 32, 64, 0 (all of them) or 'auto'."),
  (33, 'nf4', None, "Tiles that would: 11, 0 (all of them) or 'auto'."),
  (7, 'nf4', None, 'Tiles that would: 0 (all of them).'),
  (7, 'nf4', 'auto', 'Tiles that would: 0 (one scale per output); or leave this layer out.'),
  (14, 'nf4', 8, "Tiles that would: 2, 7, 0 (all of them) or 'auto'."),
  (5040, 'nf4', 100, "80, 84, 90, 105, 112, 120, 0 (all of them) or 'auto'."),
)


@pytest.mark.parametrize(('inputs', 'given', 'tile', 'advice'), ADVICE)
def test_the_tiles_that_are_advised_are_those_that_work(inputs, given, tile, advice):
  options = {'inputs': inputs, 'shards': 1, 'name': 'w', 'dimension': 'in'}
  chosen = quant.get_quantizer(given)
  with pytest.raises(ValueError, match=re.escape(advice)):
    tiles.settle(chosen, tile, **options)
  if "'auto'." in advice:
    assert inputs % tiles.settle(chosen, 'auto', **options).tile == 0
  elif tile != 'auto':
    with pytest.raises(ValueError, match="'auto' takes a tile of 8 to that of nf4"):
      tiles.settle(chosen, 'auto', **options)


def test_a_tile_may_be_a_number_of_numpy(model):
  _, report = quant.quantize(model, 'nf4', where='o', tile=np.int64(32))
  assert report.rows[0].tile == 32


@pytest.mark.usefixtures('quick_compiles')
@pytest.mark.parametrize(
  ('name', 'value'), ((*((n, np.nan) for n in MADE), ('mxfp4', np.inf), ('int8', -np.inf)))
)
def test_a_weight_that_is_not_finite_is_refused_by_name(model, name, value):
  bad = tiny.spoiled(model, value)
  line = r'layers\.o\.kernel of shape \(4, 16, 64\) holds 3 numbers that are NaN or infinite; expec'
  with pytest.raises(ValueError, match=line):
    quant.quantize(bad, name, tile=OPTIONS[name], where=('o', 'q'))


def test_quantized_weights_are_not_quantized_again(nf4):
  with pytest.raises(ValueError, match=r'layers\.down is quantized already'):
    quant.quantize(nf4, 'int8')


# The published case first: embedding 128, tile 32, fsdp 8.
@pytest.mark.parametrize(
  ('inputs', 'shards', 'tile', 'chosen'),
  ((128, 8, 32, 16), (128, 4, 32, 32), (576, 1, 64, 64), (576, 4, 64, 48), (4096, 8, 128, 128)),
)
def test_auto_takes_the_largest_tile_whose_count_the_axis_divides(inputs, shards, tile, chosen):
  given = quant.get_quantizer(f'nf4(tile={tile})')
  options = {'inputs': inputs, 'shards': shards, 'name': 'w', 'dimension': 'in'}
  assert tiles.settle(given, 'auto', **options).tile == chosen
  assert (inputs // chosen) % shards == 0


def test_a_model_of_shapes_gets_shapes(nf4):
  shapes = nnx.eval_shape(tiny.Model)
  held, _ = quant.quantize(shapes, 'nf4', tile=16)

  def own(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype), tree)

  assert own(peftlab.split(held).base) == own(peftlab.split(nf4).base)
  assert peftlab.split(held).graph == peftlab.split(nf4).graph


@pytest.mark.usefixtures('quick_compiles')
@pytest.mark.parametrize('name', MADE)
def test_qlora_equals_lora_on_the_dequantized_base(model, name):
  held, _ = quant.quantize(model, name, tile=OPTIONS[name])
  results = []
  for base in (held, quant.dequantize(held)):
    parts = tiny.randomized(peftlab.split(peftlab.attach(base, LoRA(rank=2))[0]))
    results.append(jax.jit(jax.value_and_grad(lambda a, p=parts: tiny.loss(p, a)))(parts.adapter))
  chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-6)


def test_training_changes_no_code(nf4):
  parts = peftlab.split(peftlab.attach(nf4, LoRA(rank=2))[0])
  before = [np.asarray(a).tobytes() for a in jax.tree.leaves(parts.base)]
  grad = jax.jit(jax.grad(lambda a: tiny.loss(parts, a)))
  adapter = parts.adapter
  for _ in range(2):
    adapter = jax.tree.map(lambda a, g: a - 0.1 * g, adapter, grad(adapter))
  assert [np.asarray(a).tobytes() for a in jax.tree.leaves(parts.base)] == before


def test_the_gradient_keeps_codes_and_not_the_decoded_kernel(nf4):
  """What the forward pass leaves for the backward pass has no array of a kernel's size in f32."""
  held = nf4.layers.up.kernel.get_raw_value()
  one = jax.tree.map(lambda a: a[0], held)
  x = jnp.ones((3, 64))
  _, back = jax.vjp(one.dot, x)
  kept = [a for a in jax.tree.leaves(back) if hasattr(a, 'dtype')]
  assert not [a for a in kept if a.size >= 64 * 96 and a.dtype == jnp.float32]


def test_the_carry_keeps_its_dtype(nf4):
  one = jax.tree.map(lambda a: a[0], nf4.layers.up.kernel.get_raw_value())
  for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
    x = jnp.ones((2, 64), dtype)
    assert one.dot(x).dtype == dtype
    assert jax.grad(lambda x: one.dot(x).astype(jnp.float32).sum())(x).dtype == dtype


def test_classes_are_made_once_and_undone(nf4):
  adapted = peftlab.attach(nf4, LoRA(rank=2))[0]
  cls = type(adapted.layers.q)
  assert layer.quantized_class(layer.dense_class(cls)) is cls
  assert type(quant.dequantize(adapted).layers.q).__name__ == 'AdaptedDense'


def test_fuse_keeps_the_delta_and_fuse_quantized_tells_what_it_lost(nf4):
  parts = tiny.randomized(peftlab.split(peftlab.attach(nf4, LoRA(rank=2, alpha=0.02))[0]))
  adapted = peftlab.merge(parts)
  exact = fuse.fuse(adapted)
  assert isinstance(exact.layers.q.kernel.get_raw_value(), jax.Array)
  chex.assert_trees_all_close(exact(tiny.TOKENS), adapted(tiny.TOKENS), rtol=1e-4, atol=1e-5)
  with pytest.warns(UserWarning, match='loses this much of its change'):
    again, errors = fuse.fuse_quantized(adapted)
  assert isinstance(again.layers.q.kernel.get_raw_value(), quant.Quantized)
  w = exact.layers.q.kernel.get_raw_value()
  lost = np.linalg.norm(again.layers.q.kernel.get_raw_value().dense() - w)
  delta = np.linalg.norm(w - nf4.layers.q.kernel.get_raw_value().dense())
  assert errors['layers.q'] == pytest.approx(lost / delta, rel=1e-4)
  plain = peftlab.attach(tiny.Model(), LoRA(rank=2))[0]
  with pytest.raises(ValueError, match="No kernel with the adapter 'default' is quantized"):
    fuse.fuse_quantized(plain)


@pytest.mark.parametrize('name', ('nf4', 'int8', 'mxfp4'))
@pytest.mark.parametrize('dtype', ('float32', 'bfloat16'))
@pytest.mark.usefixtures('quick_compiles')
def test_an_adapter_that_changes_nothing_leaves_the_codes_as_they_are(model, name, dtype):
  parts = peftlab.split(model)
  base = jax.tree.map(lambda a: a.astype(dtype), parts.base)
  held, _ = quant.quantize(peftlab.merge(parts.replace(base=base)), name, tile=OPTIONS[name])
  adapted, _ = peftlab.attach(held, LoRA(rank=2))  # fresh: b is 0
  merged, errors = fuse.fuse_quantized(adapted)  # without a warning, which would be an error here
  assert set(errors.values()) == {0.0}
  before, after = (peftlab.split(m) for m in (held, merged))
  assert after.graph == before.graph
  for one, other in zip(jax.tree.leaves(before.base), jax.tree.leaves(after.base), strict=True):
    assert one is other


def test_one_kernel_that_is_changed_does_not_touch_the_others(nf4):
  adapted = peftlab.attach(nf4, LoRA(rank=2, alpha=200.0))[0]
  adapted.layers.q.adapters[0].b.set_raw_value(jnp.ones_like(adapted.layers.q.adapters[0].b[...]))
  merged, errors = fuse.fuse_quantized(adapted)
  assert {name for name, error in errors.items() if error} == {'layers.q'}
  kernels = [
    (getattr(m.layers, n).kernel.get_raw_value().arrays['codes'])
    for n in ('o', 'q')
    for m in (nf4, merged)
  ]
  assert kernels[0] is kernels[1]
  assert bool((kernels[2] != kernels[3]).any())


def test_a_quantizer_from_outside_is_one_class(model):
  """Registered here: no line of the framework knows it."""
  from peftlab.quant.integers import Scaled

  @quant.register('int8_coarse_of_a_test')
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Coarse(Scaled):
    codes_dtype = 'int8'
    bound = 16.0

  try:
    held, report = quant.quantize(model, 'int8_coarse_of_a_test', tile=32)
    assert report.rows[0].quantizer == 'int8_coarse_of_a_test'
    chex.assert_trees_all_close(
      held(tiny.TOKENS), quant.dequantize(held)(tiny.TOKENS), rtol=1e-5, atol=1e-6
    )
  finally:
    del quantizers._found['int8_coarse_of_a_test']

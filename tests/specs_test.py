"""Law 7 and group J: rules, fitting, composite leaves, placement, activations, factors."""

import math

from flax import nnx
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import qwix

import peftlab
from peftlab import _specs, testing

U = P.UNCONSTRAINED


def mesh_of(**shape):
  """A mesh of the first devices, {'a': 2, 'b': 4} for example."""
  count = math.prod(shape.values())
  devices = np.array(jax.devices()[:count]).reshape(tuple(shape.values()))
  return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


MESH = dict(fsdp=2, tensor=4)
RULES = (
  ('embed', ('fsdp',)),
  ('embed', ('tensor',)),
  ('mlp', ('tensor',)),
  ('batch', ('fsdp', 'tensor')),
  ('none', ()),
)
# Logical axes -> spec, under RULES on a mesh of fsdp 2 x tensor 4.
SPECS = {
  ('embed', 'mlp'): P('fsdp', 'tensor'),
  ('embed', 'embed'): P('fsdp', 'tensor'),  # used once per array, then the next rule
  ('embed', 'embed', 'embed'): P('fsdp', 'tensor', None),
  ('mlp', 'embed', 'embed'): P('tensor', 'fsdp', None),
  ('batch', 'embed'): P(('fsdp', 'tensor'), None),
  ('embed', 'batch'): P('fsdp', None),  # not half of a rule
  ('unknown', 'mlp'): P(None, 'tensor'),
  ('none', None): P(None, None),
  ('tensor', 'embed'): P('tensor', 'fsdp'),  # a mesh axis names itself
  (): P(),
}


@pytest.mark.parametrize('axes', SPECS)
def test_rules_give_the_spec(axes):
  assert _specs.spec_for(axes, mesh_of(**MESH), RULES) == SPECS[axes]


def test_axes_of_size_1_and_missing_ones_are_left_out():
  axes = ('embed', 'mlp', 'batch')
  assert _specs.spec_for(axes, mesh_of(fsdp=8, tensor=1), RULES) == P('fsdp', None, None)
  assert _specs.spec_for(axes, mesh_of(data=8), RULES) == P(None, None, None)
  assert _specs.spec_for(('batch',), mesh_of(fsdp=1, tensor=8), RULES) == P('tensor')


def test_rules_hold_within_their_block():
  mesh = mesh_of(**MESH)
  before = _specs.current_rules()
  with _specs.use_rules((('embed', ('tensor',)),)):
    assert _specs.spec_for(('embed',), mesh) == P('tensor')
    with _specs.use_rules(None):
      assert _specs.spec_for(('embed',), mesh) == P('tensor')
  assert _specs.current_rules() is before


# (shape, spec) -> (spec, [(dim, axis)]) on a mesh of a 2 x b 4.
FITS = {
  ((3, 8), P('a', 'b')): (P(None, 'b'), [(0, 'a')]),
  ((4, 8), P('a', 'b')): (P('a', 'b'), []),
  ((4, 6), P('a', 'b')): (P('a', None), [(1, 'b')]),
  ((8,), P(('a', 'b'))): (P(('a', 'b')), []),
  ((6,), P(('a', 'b'))): (P('a'), [(0, 'b')]),  # the longest prefix that divides
  ((4,), P(('b', 'a'))): (P('b'), [(0, 'a')]),
  ((9,), P(('a', 'b'))): (P(None), [(0, 'a'), (0, 'b')]),
  ((12,), P(('a', 'b'))): (P('a'), [(0, 'b')]),  # 12 is divided by 4, not by 2 x 4
  ((0, 8), P('a', 'b')): (P('a', 'b'), []),
  ((1, 8), P('b', 'a')): (P(None, 'a'), [(0, 'b')]),
  ((3, 8, 5), P('a')): (P(None, None, None), [(0, 'a')]),  # short specs are filled up
  ((8, 3), P(None, U)): (P(None, U), []),
  ((3, 8), P(U, 'b')): (P(U, 'b'), []),
  ((), P()): (P(), []),
}


@pytest.mark.parametrize('case', FITS, ids=str)
def test_an_axis_that_does_not_divide_is_dropped_there_only(case):
  shape, spec = case
  expected, dropped = FITS[case]
  found, lost = _specs.fit_spec(shape, spec, mesh_of(a=2, b=4))
  assert found == expected
  assert [(d.dim, d.axis) for d in lost] == dropped


def test_unreduced_and_reduced_sets_are_kept():
  mesh = mesh_of(a=2, b=4)
  assert _specs.fit_spec((3,), P('a', unreduced={'b'}), mesh)[0] == P(None, unreduced={'b'})
  assert _specs.fit_spec((4,), P('a', reduced={'b'}), mesh)[0] == P('a', reduced={'b'})


BAD_SPECS = {
  'longer than the rank': ((4,), P('a', None), 'has 2 entries for an array of shape \\(4,\\)'),
  'unknown axis': ((4,), P('aa'), "names 'aa', not an axis of the mesh; did you mean 'a'?"),
}


@pytest.mark.parametrize('case', BAD_SPECS)
def test_a_spec_that_cannot_be_meant_is_an_error(case):
  shape, spec, message = BAD_SPECS[case]
  with pytest.raises(ValueError, match=message):
    _specs.fit_spec(shape, spec, mesh_of(a=2, b=4))


@st.composite
def shape_spec_mesh(draw):
  """Any shape to rank 4, any mesh to 8 devices, any spec without an axis used twice."""
  shape = tuple(draw(st.lists(st.integers(0, 24), max_size=4)))
  sizes = draw(st.sampled_from(((1,), (2,), (8,), (3,), (2, 4), (4, 2), (1, 8), (2, 2, 2), (3, 2))))
  names = ('a', 'b', 'c')[: len(sizes)]
  left = list(draw(st.permutations(names)))
  entries = []
  for _ in range(draw(st.integers(0, len(shape)))):
    count = draw(st.integers(0, len(left)))
    taken, left = left[:count], left[count:]
    single = count == 1 and draw(st.booleans())
    entries.append(None if not count else taken[0] if single else tuple(taken))
  return shape, P(*entries), dict(zip(names, sizes, strict=True))


@hypothesis.given(shape_spec_mesh())
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_whatever_is_fitted_jax_accepts(case):
  shape, spec, sizes = case
  mesh = mesh_of(**sizes)
  fitted, dropped = _specs.fit_spec(shape, spec, mesh)
  assert _specs.fit_spec(shape, fitted, mesh) == (fitted, []), 'not idempotent'
  NamedSharding(mesh, fitted).shard_shape(shape)
  for dim, size in enumerate(shape):
    wanted = _specs.entry_axes(spec[dim]) if dim < len(spec) else ()
    kept = _specs.entry_axes(fitted[dim])
    assert wanted[: len(kept)] == kept, 'not a prefix'
    assert tuple(d.axis for d in dropped if d.dim == dim) == wanted[len(kept) :]
    assert size % math.prod(sizes[a] for a in kept) == 0, 'it does not divide'
    if len(kept) < len(wanted):
      parts = math.prod(sizes[a] for a in wanted[: len(kept) + 1])
      assert size % parts, f'{wanted[len(kept)]} was dropped, but it divides'


@hypothesis.given(shape_spec_mesh())
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_an_array_can_lie_there(case):
  shape, spec, sizes = case
  mesh = mesh_of(**sizes)
  sharding = NamedSharding(mesh, _specs.fit_spec(shape, spec, mesh)[0])
  array = jax.device_put(np.zeros(shape, np.int8), sharding)
  pieces = _specs.shards(sharding.spec, mesh)
  assert all(s.data.size * pieces == array.size for s in array.addressable_shards)


class Weights(nnx.Module):
  def __init__(self):
    self.plain = nnx.Param(jnp.zeros((8, 3)), axes=('embed', 'mlp'))
    with nnx.use_eager_sharding(False):
      both = dict(axes=('mlp', 'embed'), out_sharding=('embed', 'mlp'))
      self.flax = nnx.Param(jnp.zeros((8, 4)), out_sharding=('embed', 'mlp'))
      self.both = nnx.Param(jnp.zeros((8, 4)), **both)
    self.word = nnx.Param(jnp.zeros((8,)), axes='embed')
    self.bare = nnx.Param(jnp.zeros((8, 4)))
    self.table = nnx.data(jnp.zeros((8,)))


def test_metadata_becomes_a_named_sharding_for_every_array():
  where, dropped = _specs.shardings(Weights(), mesh_of(**MESH), RULES)
  assert {path[0]: sharding.spec for path, sharding in where.items()} == {
    'plain': P('fsdp', None),
    'flax': P('fsdp', 'tensor'),
    'both': P('tensor', 'fsdp'),
    'word': P('fsdp'),
    'bare': P(None, None),
    'table': P(None),
  }
  assert [(d.path, d.dim, d.axis) for d in dropped] == [('plain', 1, 'tensor')]


def test_the_report_says_what_a_dropped_axis_costs_each_device():
  """plain is 8 x 3 x 4 = 96 bytes: 48 per device over fsdp 2; over tensor 4 too it would be 12."""
  _, (dropped,) = _specs.shardings(Weights(), mesh_of(**MESH), RULES)
  assert dropped.extra_bytes == 48 - 12
  assert str(dropped) == (
    "plain: axis 'tensor' (4) does not divide dimension 1 (3); +36 bytes per device"
  )


def test_place_puts_every_array_where_it_was_said_and_touches_no_value():
  mesh = mesh_of(**MESH)
  model = testing.StackModel((16, 21))
  placed, dropped = _specs.place(model, mesh, RULES)
  up, down = placed.layers.up.kernel, placed.layers.down.kernel
  assert up[...].sharding == NamedSharding(mesh, P(None, 'fsdp', None))
  assert down[...].sharding == NamedSharding(mesh, P(None, None, 'fsdp'))
  assert {d.path for d in dropped} == {
    'layers.up.kernel',
    'layers.up.bias',
    'layers.down.kernel',
  }
  np.testing.assert_array_equal(up[...], model.layers.up.kernel[...])
  assert peftlab.split(placed).graph == peftlab.split(model).graph


def test_a_composite_leaf_gives_each_array_its_own_sharding():
  mesh = mesh_of(fsdp=2, tensor=2)
  module = nnx.Module()
  module.w = nnx.Param({'codes': jnp.zeros((2, 2)), 'scale': jnp.zeros((3, 3))})
  module.w.set_metadata('axes', ('embed', 'mlp'))
  where, dropped = _specs.shardings(module, mesh, RULES)
  assert where['w',] == {
    'codes': NamedSharding(mesh, P('fsdp', 'tensor')),
    'scale': NamedSharding(mesh, P(None, None)),
  }
  assert len(dropped) == 2


def test_codes_and_scales_are_each_fitted_to_their_own_shape():
  """Codes (128, 4, 32) and scales (4, 4, 32) of one kernel, tiles of 32, on fsdp 8."""
  array = qwix.quantize(
    jnp.ones((128, 4, 32)), jnp.int8, channelwise_axes=(1, 2), tiled_axes={0: 32}
  )
  assert (array.qvalue.shape, array.scale.shape) == ((128, 4, 32), (4, 4, 32))
  module = nnx.Module()
  module.w = nnx.Param(array, axes=('embed', 'mlp', 'head_dim'))
  where, dropped = _specs.shardings(module, mesh_of(fsdp=8), RULES)
  found = where['w',]
  assert (found.qvalue.spec, found.scale.spec) == (P('fsdp', None, None), P(None, None, None))
  assert [(d.size, d.axis) for d in dropped] == [(4, 'fsdp')]


@pytest.mark.parametrize('axes', (('embed',), ('embed', 'mlp', 'layers'), ()))
def test_metadata_that_disagrees_with_the_rank_is_an_error(axes):
  module = nnx.Module()
  module.w = nnx.Param(jnp.zeros((4, 4)), axes=axes)
  with pytest.raises(ValueError, match=r'^w has axes .* for shape \(4, 4\) \(2 dimensions\)'):
    _specs.shardings(module, mesh_of(**MESH), RULES)


BAD_MESHES = {
  'unknown axis': ({'fspd': 8}, "No mesh axis 'fspd'; did you mean 'fsdp'?"),
  'size 0': ({'fsdp': 8, 'tensor': 0}, "Mesh axis 'tensor' has size 0; it must be at least 1."),
  'too few': ({'fsdp': 4}, 'Mesh fsdp 4 needs 4 devices; there are 8.'),
  'too many': ({'fsdp': 8, 'tensor': 2}, 'Mesh fsdp 8 x tensor 2 needs 16 devices; there are 8.'),
  'empty': ({}, 'Mesh 1 needs 1 devices; there are 8.'),
}


@pytest.mark.parametrize('case', BAD_MESHES)
def test_a_mesh_that_does_not_fit_is_refused(case):
  shape, message = BAD_MESHES[case]
  with pytest.raises(ValueError, match=f'^{message}'):
    _specs.make_mesh(shape)


def test_meshes_are_auto_and_in_the_order_given():
  mesh = _specs.make_mesh({'tensor': 2, 'fsdp': 4})
  assert (mesh.axis_names, mesh.axis_types) == (('tensor', 'fsdp'), (AxisType.Auto,) * 2)
  assert [tuple(m.shape.values()) for m in testing.meshes().values()] == [(8, 1), (4, 2), (2, 4)]


def test_an_activation_is_constrained_and_never_fitted():
  """6 rows over fsdp 4: GSPMD pads an activation, so its spec stays."""
  mesh = mesh_of(fsdp=4, tensor=2)
  run = jax.jit(lambda x: jnp.sum(2 * _specs.constrain(x, ('batch', 'mlp'), RULES)))
  with jax.set_mesh(mesh):
    text = run.lower(jnp.ones((6, 3))).as_text()
    assert run(jnp.ones((6, 3))) == 36
  assert text.count('sdy.sharding_constraint') == 1
  assert '[{"fsdp", "tensor"}, {}]' in text


def test_without_a_mesh_or_on_an_explicit_one_an_activation_stays():
  x = jnp.zeros((8, 8))
  assert _specs.constrain(x, ('batch', 'mlp')) is x
  with jax.set_mesh(jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Explicit,))):
    assert jax.jit(lambda x: _specs.constrain(x, ('batch', None)))(x).shape == (8, 8)


def test_inside_shard_map_the_manual_axes_are_left_out():
  mesh = mesh_of(stage=2, tensor=4)

  def body(x):
    return _specs.constrain(x, ('stage', 'mlp'), RULES)

  with jax.set_mesh(mesh):
    mapped = jax.shard_map(body, in_specs=P('stage'), out_specs=P('stage'), axis_names={'stage'})
    y = jax.jit(mapped)(jnp.zeros((2, 8)))
  assert y.sharding.spec == P('stage', 'tensor')


# (dims, shape, kernel) -> spec of a factor, on fsdp 2 x tensor 4: rows as in a TP pair.
TENSOR = {'in': (), 'out': ('tensor',)}
ROW = {'in': ('tensor',), 'out': ()}
FSDP = {'in': ('fsdp',), 'out': ('tensor',)}
FACTORS = (
  (('in', 'rank'), (16, 2), TENSOR, P(None, None)),  # column-parallel: A replicated,
  (('rank', 'out'), (2, 24), TENSOR, P(None, 'tensor')),  # B sharded
  (('in', 'rank'), (16, 2), ROW, P('tensor', None)),  # row-parallel: A sharded,
  (('rank', 'out'), (2, 24), ROW, P(None, None)),  # B replicated
  (('in', 'rank'), (16, 2), FSDP, P(('fsdp', 'tensor'), None)),
  (('rank', 'out'), (2, 24), FSDP, P(None, ('tensor', 'fsdp'))),
  (('in', 'rank'), (6, 2), FSDP, P('fsdp', None)),
  (('in', 'out'), (16, 24), FSDP, P('fsdp', 'tensor')),
  (('rank', 'rank'), (2, 2), FSDP, P(None, None)),
  (('out',), (24,), FSDP, P(('tensor', 'fsdp'))),
  ((), (), FSDP, P()),
)


@pytest.mark.parametrize('case', FACTORS, ids=str)
def test_a_factor_takes_its_spec_from_the_kernel(case):
  dims, shape, kernel, expected = case
  found, _ = _specs.fit_spec(shape, _specs.factor_spec(dims, kernel), mesh_of(**MESH))
  assert found == expected

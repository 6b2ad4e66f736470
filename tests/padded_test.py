"""Law 7 with indivisible=pad and =error: stored longer, read as if not, refused in one line."""

import math

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import peftlab
from peftlab import _padded, _parts, _specs, appliers
from peftlab.models.layers import Dense
from peftlab.plugins.lora import LoRA
from peftlab.quant import saved
from peftlab.train import checkpoints, opt_state

pytestmark = pytest.mark.usefixtures('quick_compiles')


def mesh_of(kind=AxisType.Auto, **shape):
  devices = np.array(jax.devices()[: math.prod(shape.values())]).reshape(tuple(shape.values()))
  return Mesh(devices, tuple(shape), axis_types=(kind,) * len(shape))


MESH = dict(fsdp=4, tensor=2)
# (shape, spec, stack) -> (spec, stored shape, [(dim, axis)] dropped) on a mesh of a 2 x b 4.
PADS = {
  ((3, 8), P('a', 'b'), 0): (P('a', 'b'), (4, 8), []),
  ((4, 8), P('a', 'b'), 0): (P('a', 'b'), (4, 8), []),
  ((9, 64), P('b'), 0): (P('b', None), (12, 64), []),  # 9 heads over 4: 3 each, one holds none
  ((9,), P(('a', 'b')), 0): (P(('a', 'b')), (16,), []),  # 2 each
  ((6,), P(('a', 'b')), 0): (P(('a', 'b')), (8,), []),  # 1 each, where a alone leaves 3
  ((3,), P(('a', 'b')), 0): (P(('a', 'b')), (8,), []),
  ((2,), P(('a', 'b')), 0): (P('a'), (2,), [(0, 'b')]),  # 1 each already
  ((1, 8), P('b', 'a'), 0): (P(None, 'a'), (1, 8), [(0, 'b')]),
  ((30, 9), P('b', 'a'), 1): (P(None, 'a'), (30, 10), [(0, 'b')]),  # no layer is made up
  ((0, 3), P('a', 'b'), 0): (P('a', 'b'), (0, 4), []),
  ((5, 3), P(P.UNCONSTRAINED, 'a'), 0): (P(P.UNCONSTRAINED, 'a'), (5, 4), []),
}


@pytest.mark.parametrize('case', PADS, ids=str)
def test_every_axis_that_lessens_a_share_is_kept(case):
  shape, spec, stack = case
  found, stored, lost = _padded.pad_spec(shape, spec, mesh_of(a=2, b=4), stack=stack)
  assert (found, stored, [(d.dim, d.axis) for d in lost]) == PADS[case]
  NamedSharding(mesh_of(a=2, b=4), found).shard_shape(stored)


class Layer(nnx.Module):
  """Sizes that neither 4 nor 2 divides: 50 wide, 3 heads, 27 hidden."""

  def __init__(self, rngs):
    heads = {'q_heads': 3, 'head_dim': 16}
    self.q = Dense({'embed': 50}, heads, rngs=rngs, bias=True)
    self.o = Dense(heads, {'embed': 50}, rngs=rngs)
    axes = {'kernel_metadata': {'axes': ('embed', 'mlp')}, 'bias_metadata': {'axes': ('mlp',)}}
    self.up = nnx.Linear(50, 27, rngs=rngs, **axes)
    self.down = nnx.Linear(27, 50, rngs=rngs, kernel_metadata={'axes': ('mlp', 'embed')})

  def __call__(self, x):
    x = x + self.o(jnp.tanh(self.q(x)))
    return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
  def __init__(self):
    self.layers = peftlab.stack(Layer, 3, rngs=0)

  def __call__(self, x, applier='scan'):
    return appliers.get_applier(applier).run(self.layers, x, lambda layer, x: layer(x))[0]


X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 50)), jnp.float32)


@pytest.fixture(scope='module')
def model():
  return Model()


QUANTIZERS = {'none': {}, 'int8': {'tile': 0}, 'nf4': {'tile': 10, 'where': ('q', 'up')}}


def adapted(model, name, mesh, indivisible):
  """Placed, quantized, with an adapter whose numbers are the same whatever the mesh."""
  if mesh is not None:
    model, _ = _padded.place(model, mesh, indivisible=indivisible)
  if name != 'none':
    model, _ = peftlab.quantize(model, name, indivisible=indivisible, **QUANTIZERS[name])
  model, report = peftlab.attach(model, LoRA(rank=2), indivisible=indivisible)
  parts = peftlab.split(model)
  random = np.random.default_rng(3)

  def draw(held, moves):
    noise = random.standard_normal(held.shape) * 0.05 if moves else 0.0
    new = np.asarray(held) + np.asarray(noise, held.dtype)
    return _padded.place_tree(jax.device_put(new, _padded.cut(held).sharding), held)

  draws = jax.tree.map(draw, parts.adapter, peftlab.trainable(parts), is_leaf=_padded.is_padded)
  return parts.replace(adapter=draws), report


def results(parts, mesh, applier):
  """(outputs, {path: gradient} of the trainable arrays, without padding)."""
  trained, frozen = opt_state.partition(parts)

  def loss(trained, frozen, base):
    whole = parts.replace(adapter=opt_state.combine(trained, frozen), base=base)
    y = peftlab.merge(whole)(X, applier)
    return (y * y).mean(), y

  run = jax.grad(loss, has_aux=True)
  if mesh is not None and AxisType.Explicit in mesh.axis_types:
    out = (jax.tree.map(lambda a: a.sharding, trained), NamedSharding(mesh, P()))
    run = jax.sharding.auto_axes(run, out_sharding=out)
  with _specs.using(mesh):
    grads, y = jax.jit(run)(trained, frozen, parts.base)
  grads = jax.tree.map(np.asarray, grads, is_leaf=_padded.is_padded)
  return np.asarray(y), _parts.flat(grads)


EQUAL = (
  ('none', 'scan', AxisType.Auto),
  ('int8', 'scan', AxisType.Explicit),
  ('nf4', 'sequential', AxisType.Auto),
)


@pytest.mark.parametrize(('name', 'applier', 'kind'), EQUAL)
def test_padded_equals_unsharded(model, name, applier, kind):
  """Outputs and gradients to 1e-5 of their size."""
  y, grads = results(adapted(model, name, None, 'drop')[0], None, 'scan')
  mesh = mesh_of(kind, **MESH)
  parts, report = adapted(model, name, mesh, 'pad')
  assert _padded.paddings(peftlab.merge(parts))
  assert report.trainable == sum(g.size for g in grads.values())  # padding is not counted
  got_y, got = results(parts, mesh, applier)
  np.testing.assert_allclose(got_y, y, rtol=0, atol=1e-5 * np.abs(y).max())
  assert got.keys() == grads.keys()
  for path, grad in grads.items():
    np.testing.assert_allclose(got[path], grad, rtol=0, atol=1e-5 * np.abs(grad).max())


def test_what_is_stored_and_what_each_device_holds(model):
  placed, dropped = _padded.place(model, mesh_of(**MESH), indivisible='pad')
  held = {p: v for p, v in _parts.flat(_parts.split(placed).base).items() if _padded.is_padded(v)}
  found = {_parts.path_name(p): (v.array.shape, v.sharding.spec, v.shape) for p, v in held.items()}
  assert found == {
    'layers.q.kernel': ((3, 52, 4, 16), P(None, 'fsdp', 'tensor', None), (3, 50, 3, 16)),
    'layers.q.bias': ((3, 4, 16), P(None, 'tensor', None), (3, 3, 16)),
    'layers.o.kernel': ((3, 4, 16, 52), P(None, 'tensor', None, 'fsdp'), (3, 3, 16, 50)),
    'layers.up.kernel': ((3, 52, 28), P(None, 'fsdp', 'tensor'), (3, 50, 27)),
    'layers.up.bias': ((3, 28), P(None, 'tensor'), (3, 27)),
    'layers.down.kernel': ((3, 28, 52), P(None, 'tensor', 'fsdp'), (3, 27, 50)),
  }
  assert not dropped
  one = 3 * 52 * 28 * 4 // 8  # bytes of a device
  told = [str(p) for p in _padded.paddings(placed) if p.path == 'layers.up.kernel']
  name, end = 'layers.up.kernel: dimension', 'bytes per device'
  assert told == [
    f'{name} 1 (50) is stored as 52 for fsdp; +{one * 2 // 52:,} {end}',
    f'{name} 2 (27) is stored as 28 for tensor; +{one // 28:,} {end}',
  ]
  for path, value in held.items():
    plain = _parts.flat(_parts.split(model).base)[path]
    np.testing.assert_array_equal(np.asarray(value), np.asarray(plain))


def test_a_stack_axis_is_dropped_and_says_why(model):
  placed, dropped = _padded.place(model, mesh_of(stage=2, tensor=4), indivisible='pad')
  assert placed.layers.up.kernel.get_raw_value().array.shape == (3, 50, 28)
  lost = next(d for d in dropped if d.path == 'layers.up.kernel')
  assert (lost.dim, lost.axis) == (0, 'stage')
  assert str(lost).endswith(
    '; not padded: stack axes are not; the pipeline applier lays layers out'
  )


def test_error_names_every_array(model):
  mesh = mesh_of(**MESH)
  with pytest.raises(ValueError, match=r"^indivisible is 'error', and 10 mesh") as told:
    _padded.place(model, mesh, indivisible='error')
  assert "layers.q.kernel dimension 2 (3) by 'tensor' (2; would: 1, 3)" in str(told.value)
  assert "layers.up.kernel dimension 1 (50) by 'fsdp' (4; would: 1, 2, 5)" in str(told.value)
  sixths, _ = _specs.place(model, mesh_of(fsdp=2, tensor=3))
  halved, _ = _specs.place(model, mesh_of(fsdp=2))
  with pytest.raises(ValueError, match=r'layers\.up\.kernel\.codes dimension 1 \(5\) by'):
    peftlab.quantize(halved, 'int8', tile=10, where='up', indivisible='error')
  with pytest.raises(ValueError, match=r'layers\.q\.adapters\.default\.a dimension 1 \(50\) by'):
    peftlab.attach(sixths, LoRA(rank=2), where='q', indivisible='error')
  with pytest.raises(ValueError, match=r"^indivisible is 'padd'; did you mean 'pad'"):
    peftlab.attach(model, LoRA(rank=2), indivisible='padd')


def test_files_hold_no_padding(model, tmp_path):
  """A base and a checkpoint written from padded arrays are those of one device, and come back."""
  mesh, other = mesh_of(**MESH), mesh_of(fsdp=2, tensor=4)
  placed = _padded.place(model, mesh, indivisible='pad')[0]
  held = peftlab.quantize(placed, 'int8', tile=0, indivisible='pad')[0]
  alone = peftlab.quantize(model, 'int8', tile=0)[0]
  saved.save(held, tmp_path / 'base')
  outline = nnx.eval_shape(Model)
  for where, option in ((None, 'drop'), (other, 'pad'), (other, 'drop')):
    back = saved.load(outline, tmp_path / 'base', mesh=where, indivisible=option)
    assert bool(_padded.paddings(back)) == (option == 'pad')
    trees = [_padded.cut_tree(_parts.split(m).base) for m in (back, alone)]
    chex.assert_trees_all_equal(*jax.device_get(trees))

  parts = adapted(model, 'none', mesh, 'pad')[0]
  options = opt_state.StepOptions(optimizer='adafactor')
  state = opt_state.init_opt_state(parts, options, learning_rate=1.0)
  tree = {'adapter': parts.adapter, 'opt_state': state}
  store = checkpoints.Checkpoints(tmp_path / 'run', config={}, base='')
  store.save(3, tree, position={})
  elsewhere = adapted(model, 'none', other, 'pad')[0]
  like = {'adapter': elsewhere.adapter, 'opt_state': opt_state.init_opt_state(
    elsewhere, options, learning_rate=0.0
  )}  # fmt: skip
  store.close()
  back, about = checkpoints.Checkpoints(tmp_path / 'run', config={}, base='').restore(like)
  assert about['arrays']['adapter.layers.up.adapters.0.a'] == 'float32[3,50,2]'
  chex.assert_trees_all_equal(*(jax.device_get(_padded.cut_tree(t)) for t in (back, tree)))
  assert jax.tree.structure(back) == jax.tree.structure(like)


@pytest.mark.parametrize('name', ('adamw', 'adafactor'))
def test_an_optimizer_sees_no_padding(model, name):
  """Adafactor takes means over rows and columns, so its state is that of the arrays as they are."""
  options = opt_state.StepOptions(optimizer=name)
  padded = adapted(model, 'none', mesh_of(**MESH), 'pad')[0]
  wide, plain = (
    opt_state.init_opt_state(parts, options, learning_rate=1.0).inner
    for parts in (padded, adapted(model, 'none', None, 'drop')[0])
  )
  chex.assert_trees_all_equal_shapes(_padded.cut_tree(wide), plain)
  if name == 'adamw':  # its moments lie as the arrays do
    structure = jax.tree.structure(opt_state.partition(padded)[0])
    assert jax.tree.structure(optax.tree.get(wide, 'mu')) == structure

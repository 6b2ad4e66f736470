"""Weighted merges: of deltas, with every scale; nothing else touched, everything checked first."""

import dataclasses
import json
import pathlib
import warnings

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _adapter, _claims, _parts, _registry, _stack
from peftlab.fuse import combine, fuse
from peftlab.plugins.dora import DoRA
from peftlab.plugins.loha import LoHa
from peftlab.plugins.lora import LoRA
from peftlab.plugins.vera import VeRA

FOLDER = pathlib.Path(__file__).parent.parent / 'goldens' / 'peft_zoo' / 'weighted_merge'
FACTS = json.loads((FOLDER / 'merges.json').read_text())
STACK = ('layers', 'kernel')
METHODS = {'svd': 'svd', 'magnitude_prune': 'magnitude', 'dare_linear': 'dare'}

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(autouse=True)
def _own_setting():
  """Adapter types are written for JAX's own setting of rank promotion."""
  with jax.numpy_rank_promotion('allow'):
    yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasedLoRA(LoRA):
  """LoRA whose B has a bias: PEFT's lora_bias."""

  def slots(self):
    return super().slots() | {'added': peftlab.Slot(dims='out')}

  def apply(self, x, base, p):
    return super().apply(x, base, p) + p.added * p.scale

  def fuse_bias(self, b, p):
    return b + p.added * p.scale

  @classmethod
  def from_factors(cls, a, b, bias=None):
    adapter, slots = super().from_factors(a, b)
    return adapter, slots | {'added': jnp.zeros(b.shape[1]) if bias is None else bias}


class One(nnx.Module):
  def __init__(self, ins=12, outs=8):
    self.layer = nnx.Linear(ins, outs, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.layer(x)


class Stacked(nnx.Module):
  """An embedding, a stack of three layers, a head."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(10, 6, rngs=rngs)
    self.layers = peftlab.stack(lambda rngs: nnx.Linear(6, 6, rngs=rngs), 3, rngs=0)
    self.last = nnx.Linear(6, 5, rngs=rngs)

  def __call__(self, tokens):
    run = peftlab.appliers.Scan().apply
    x = self.embed(tokens)
    x, _ = run(peftlab.split(self.layers), x, lambda layer, x: x + jnp.tanh(layer(x)))
    return self.last(x)


def golden(family, biased=False):
  """The model of the goldens with adapters a and b, and all arrays."""
  held = np.load(FOLDER / 'merges.npz')
  model = One()
  kind = BiasedLoRA if biased else LoRA
  for name, alpha in (('a', 4.0), ('b', 4.0 if family == 'halves_of_the_same' else 2.0)):
    adapter = kind(rank=2, alpha=alpha, rslora=family == 'rslora')
    model, _ = peftlab.attach(model, adapter, name=name)
    attached = model.layer.adapters[-1]
    start = f'{family}/{name}/lora_'
    attached.a[...] = jnp.asarray(held[f'{start}A.weight'].T, jnp.float32)
    attached.b[...] = jnp.asarray(held[f'{start}B.weight'].T, jnp.float32)
    if biased:
      attached.added[...] = jnp.asarray(held[f'{start}B.bias'], jnp.float32)
    assert float(attached.scale[...]) == pytest.approx(float(held[f'{family}/{name}/scale']))
  return model, held


def randomized(model, seed=0):
  parts = peftlab.split(model)
  flags = _parts.flat(peftlab.trainable(parts))
  leaves = {}
  for i, (path, array) in enumerate(sorted(_parts.flat(parts.adapter).items(), key=str)):
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), array.shape)
    leaves[path] = array + 0.3 * noise if flags[path] else array
  return peftlab.merge(parts.replace(adapter=_parts.nest(leaves)))


def delta(model, name):
  """{path: what an adapter adds there}, by the fused kernels minus those of the base."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of an embedding
    merged = peftlab.detach(fuse(model, name=name))
  before, after = (_parts.flat(peftlab.split(m).base) for m in (peftlab.detach(model), merged))
  return {path: np.asarray(after[path] - array) for path, array in before.items()}


def change(model, name):
  """The kernel and the bias that an adapter alone adds to the layer of `One`."""
  model = peftlab.merge(peftlab.split(model))
  peftlab.activate(model, name)
  at = [model(x) - peftlab.detach(model)(x) for x in (jnp.eye(12), jnp.zeros((1, 12)))]
  return np.asarray(at[0] - at[1]).T, np.asarray(at[1][0])


@pytest.mark.parametrize('case', [c for c in FACTS if not c.endswith('dare_linear')])
def test_a_merge_equals_the_arithmetic_on_deltas(case):
  family, label = case.split('/')
  facts = FACTS[case]
  model, held = golden(family, biased=family == 'bias')
  method = METHODS.get(facts['method'], facts['method'])
  more = {'density': facts['density']} if 'density' in facts else {}
  if method == 'svd':
    more['rank'] = facts['svd_rank']
  if facts.get('majority_sign_method') == 'frequency':
    more['vote'] = 'count'
  weights = dict(zip('ab', facts['weights'], strict=True))
  model, report = combine(model, weights, name='both', method=method, **more)
  kernel, bias = change(model, 'both')
  expected = held[f'{case}/expected']
  chex.assert_trees_all_close(kernel, expected.astype(np.float32), atol=2e-5)
  if case == 'bias/linear':
    chex.assert_trees_all_close(bias, held['bias/expected_bias'].astype(np.float32), atol=1e-5)
  if label == 'svd_rank_2':
    whole = held[f'{family}/linear/expected']
    lost = np.linalg.norm(whole - expected) / np.linalg.norm(whole)
    assert report.error == pytest.approx(lost, abs=1e-5)
  else:
    assert report.error < 1e-5


def test_half_and_half_of_one_adapter_is_itself_at_its_own_rank():
  model, held = golden('halves_of_the_same')
  model, report = combine(model, {'a': 0.5, 'b': 0.5}, name='both')
  expected = held['halves_of_the_same/a/delta'].astype(np.float32)
  chex.assert_trees_all_close(change(model, 'both')[0], expected, atol=1e-5)
  assert [row.rank for row in report.rows] == [2]


def test_opposite_weights_of_one_adapter_cancel():
  model, _ = golden('halves_of_the_same')
  model, report = combine(model, {'a': 1.0, 'b': -1.0}, name='none')
  np.testing.assert_allclose(change(model, 'none')[0], 0.0, atol=1e-6)
  assert report.error < 1e-5


@pytest.mark.parametrize('weight', (2.5, -1.5, 0.0))
@pytest.mark.parametrize('method', ('linear', 'cat'))
def test_a_weight_scales_the_delta(weight, method):
  model, held = golden('plain')
  model, _ = combine(model, {'a': weight}, name='scaled', method=method)
  expected = (weight * held['plain/a/delta']).astype(np.float32)
  chex.assert_trees_all_close(change(model, 'scaled')[0], expected, atol=1e-5)


def test_cat_lays_factors_side_by_side():
  model = randomized(two_ranks())
  model, report = combine(model, {'one': 0.5, 'two': 2.0}, name='both', method='cat')
  assert {row.path: row.rank for row in report.rows} == {'embed': 2, 'last': 5, 'layers': 5}
  assert report.error == 0


def two_ranks():
  """Two adapters of other ranks and scales; one of them has rank and scale by pattern too."""
  model = Stacked()
  first = dict(where=('layers', 'last', 'embed'), fields={'alpha': {'last': 3.0}})
  model, _ = peftlab.attach(model, LoRA(rank=2, alpha=8.0), name='one', **first)
  second = dict(where=('layers', 'last'), rngs=1)
  model, _ = peftlab.attach(model, LoRA(rank=3, rslora=True), name='two', **second)
  return model


@pytest.mark.parametrize('method', ('linear', 'cat', 'svd'))
def test_patterns_stacks_and_embeddings_sum_as_their_deltas_do(method):
  model = randomized(two_ranks())
  one, two = delta(model, 'one'), delta(model, 'two')
  more = {'rank': 6} if method == 'svd' else {}
  merged, _ = combine(model, {'one': 0.7, 'two': -0.3}, name='both', method=method, **more)
  expected = {path: 0.7 * one[path] - 0.3 * two[path] for path in one}
  chex.assert_trees_all_close(delta(merged, 'both'), expected, atol=1e-5)


def test_it_is_attached_switched_off_and_every_other_array_is_the_same_object():
  model = randomized(two_ranks())
  tokens = jnp.arange(7)
  before = peftlab.split(model)
  merged, _ = combine(model, {'one': 1.0, 'two': 1.0}, name='both')
  after = peftlab.split(merged)
  peftlab.assert_base_shared(before, after)
  kept = _parts.flat(after.adapter)
  assert all(kept[path] is array for path, array in _parts.flat(before.adapter).items())
  assert peftlab.split(model).graph == before.graph
  chex.assert_trees_all_equal(merged(tokens), model(tokens))
  peftlab.activate(model, 'one', 'two')
  peftlab.activate(merged, 'both')
  back = peftlab.detach(merged, 'both')
  assert peftlab.split(back).graph != before.graph  # it was switched off there
  assert all(
    _parts.flat(peftlab.split(back).adapter)[path] is array
    for path, array in _parts.flat(before.adapter).items()
  )


def test_types_mix_and_shared_arrays_count():
  model = One(8, 8)
  for name, adapter in (('low', LoRA(rank=2)), ('vera', VeRA(rank=4)), ('loha', LoHa(rank=2))):
    model, _ = peftlab.attach(model, adapter, name=name)
  model = randomized(model)
  low, vera, loha = (delta(model, name) for name in ('low', 'vera', 'loha'))
  expected = {path: low[path] + vera[path] - loha[path] for path in low}
  weights = {'vera': 1.0, 'low': 1.0, 'loha': -1.0}
  merged, report = combine(model, weights, name='all')
  chex.assert_trees_all_close(delta(merged, 'all'), expected, atol=2e-5)
  assert report.rows[0].rank == 8
  with pytest.raises(ValueError, match='VeRA has no factors that cat could lay side by side'):
    combine(model, weights, name='all', method='cat')


ADDITIVE = [
  name
  for name in peftlab.adapter_types()
  for kind in [_registry.adapters.get(name)]
  if kind.additive and kind.mergeable and not kind.point and name not in ('bias', 'full')
]


@pytest.mark.parametrize('name', ADDITIVE)
def test_every_additive_type_can_be_merged(name):
  adapter = _claims.small(_registry.adapters.get(name))
  model, _ = peftlab.attach(One(48, 32), adapter, where='.*', name='a')
  model = randomized(model)
  merged, _ = combine(model, {'a': np.float32(0.5)}, name='half')
  half = {path: array / 2 for path, array in delta(model, 'a').items()}
  chex.assert_trees_all_close(delta(merged, 'half'), half, atol=3e-5)


def test_density_is_honoured_with_one_adapter():
  model, held = golden('plain')
  merged, _ = combine(model, {'a': 1.0}, name='half', method='magnitude', density=0.5)
  kernel = change(merged, 'half')[0]
  whole = held['plain/a/delta']
  largest = np.sort(np.abs(whole).ravel())[-48:].min()
  expected = np.where(np.abs(whole) >= largest, whole, 0).astype(np.float32)
  chex.assert_trees_all_close(kernel, expected, atol=1e-5)


@pytest.mark.parametrize('method', ('ties', 'dare', 'dare_ties', 'magnitude'))
def test_density_1_of_one_adapter_is_itself(method):
  model, held = golden('plain')
  merged, _ = combine(model, {'a': 1.0}, name='same', method=method, density=1.0)
  expected = held['plain/a/delta'].astype(np.float32)
  chex.assert_trees_all_close(change(merged, 'same')[0], expected, atol=1e-5)


def test_dare_drops_other_entries_in_every_layer_and_the_same_for_a_seed():
  model = randomized(two_ranks())
  options = dict(name='d', method='dare', density=0.5)
  one, again, other = (combine(model, {'two': 1.0}, rngs=s, **options)[0] for s in (0, 0, 1))
  whole, dropped = (delta(m, n)[STACK] for m, n in ((model, 'two'), (one, 'd')))
  same = [np.abs(d) < 1e-5 for d in dropped]
  assert 0.2 < np.mean(same) < 0.8
  assert not np.array_equal(same[0], same[1])
  chex.assert_trees_all_close(dropped, np.where(same, 0, 2 * whole), atol=2e-5)
  chex.assert_trees_all_equal(delta(again, 'd'), delta(one, 'd'))
  assert np.abs(delta(other, 'd')[STACK] - dropped).max() > 0.1


@pytest.mark.parametrize(
  ('options', 'message'),
  (
    (dict(weights=['a', 'b']), r"^weights is \['a', 'b'\]; expected {name: weight}\.$"),
    (dict(method='svd', rank=10**6), r'^rank is 1000000; the largest full rank .* is \d+ \(\w+'),
    (dict(weights={}), 'There is no adapter to combine'),
    (dict(weights={'aa': 1.0}), "no adapter 'aa'; did you mean 'a'"),
    (dict(name='b'), "already has an adapter named 'b'"),
    (dict(name='b b'), 'must be made of letters'),
    (
      dict(weights={'a': float('nan')}),
      "weight of 'a' is nan; it must be a number that is finite in float32",
    ),
    (dict(weights={'a': 1e40, 'b': 1.0}), "'a' is 1e.40; it must be a number that is finite"),
    (dict(weights={'a': 3e38, 'b': 3e38}), 'beyond all numbers of float32; expected smaller'),
    (dict(method='tise'), "No method 'tise'; did you mean 'ties'"),
    (dict(method='ties'), 'ties needs the share of entries to keep'),
    (dict(method='ties', density=0.0), 'above 0 and at most 1'),
    (dict(density=0.5), 'linear leaves nothing out'),
    (dict(method='ties', density=0.5, vote='sums'), "No vote 'sums'; did you mean 'sum'"),
    (dict(vote='count'), 'linear elects no signs'),
    (dict(method='cat', rank=2), 'with cat it is the sum of the ranks'),
    (dict(method='svd'), 'svd needs the rank'),
    (dict(rank=0), 'rank is 0; it must be at least 1'),
    (dict(into=LoHa), 'LoHa cannot hold a change that is given as two factors'),
  ),
)
def test_a_wrong_argument_is_refused_and_nothing_changes(options, message):
  model, _ = golden('plain')
  before = peftlab.split(model)
  given = {'weights': {'a': 1.0, 'b': 1.0}, 'name': 'both'} | options
  with pytest.raises(ValueError, match=message):
    combine(model, given.pop('weights'), **given)
  assert peftlab.split(model).graph == before.graph


def test_a_type_whose_change_depends_on_the_weight_is_refused_with_the_reason():
  model, _ = golden('plain')
  model, _ = peftlab.attach(model, DoRA(rank=2), name='dora')
  with pytest.raises(ValueError, match=r'DoRA cannot be combined \(layer\): its change depends on'):
    combine(model, {'a': 1.0, 'dora': 1.0}, name='both')


def test_nan_is_refused_and_nothing_changes():
  model, _ = golden('plain')
  model.layer.adapters[1].b[...] = jnp.full((2, 8), jnp.inf)
  with pytest.raises(ValueError, match="Adapter 'b' of layer holds NaN or infinity in 'b'"):
    combine(model, {'a': 1.0, 'b': 1.0}, name='both')


def test_the_result_is_saved_and_loaded_like_any_other(tmp_path):
  model, _ = golden('rslora')
  merged, _ = combine(model, {'a': 0.7, 'b': -0.3}, name='both')
  peftlab.save_adapter(merged, tmp_path / 'both', name='both')
  loaded = peftlab.load_adapter(One(), tmp_path / 'both')
  chex.assert_trees_all_close(delta(loaded, 'default'), delta(merged, 'both'), atol=1e-6)


@pytest.mark.parametrize('name', peftlab.adapter_types())
def test_each_type_says_rightly_whether_its_change_depends_on_the_weight(name):
  kind = _registry.adapters.get(name)
  if not kind.mergeable:
    return
  adapter = kind(**kind.small)
  sizes = {'in': 48, 'out': 32}
  slots, shapes = _adapter.slots_at(adapter, sizes=sizes)
  keys = _stack.root_key(3)
  arrays = {}
  for i, (slot, shape) in enumerate(shapes.items()):
    dtype = slots[slot].dtype
    if jnp.issubdtype(dtype, jnp.inexact):
      arrays[slot] = 0.3 * jax.random.normal(jax.random.fold_in(keys, i), shape)
    else:
      arrays[slot] = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
  values = _adapter.Values(arrays)
  weights = [jax.random.normal(jax.random.key(k), (48, 32)) for k in (1, 2)]
  changes = [
    (adapter.fuse(w, values) - w, adapter.fuse_bias(w[0], values) - w[0])
    for w in (jnp.zeros((48, 32)), *weights)
  ]
  same = all(
    np.abs(a - b).max() < 1e-4 for one in changes[1:] for a, b in zip(changes[0], one, strict=True)
  )
  assert same == kind.additive
  pair = adapter.to_factors(values)
  if pair is not None:
    chex.assert_trees_all_close(pair[0] @ pair[1], changes[0][0], atol=1e-5)

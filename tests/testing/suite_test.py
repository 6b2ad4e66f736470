"""The suite: honest adapter types from outside pass all of it, each broken one fails by name."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

import peftlab
from peftlab import _adapter, _attach, _parts, _registry, _specs, quant, testing
from peftlab.formats import adapter_values
from peftlab.testing import claims, sharded
from tests.testing import broken_plugins

HONEST = pathlib.Path(__file__).with_name('honest_plugins.py')
NAMES = ('bias', 'frozen_random', 'gate', 'input_scaling', 'magnitude', 'principal', 'scaling')


pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(scope='module')
def honest():
  """The types of honest_plugins.py, by name; registered as long as this module runs."""
  _registry.adapters.names()
  kept = dict(_registry.adapters._found)
  yield peftlab.load_plugin(str(HONEST))
  _registry.adapters._found.clear()
  _registry.adapters._found.update(kept)


def test_a_plugin_file_tells_its_types(honest):
  assert sorted(honest) == [f'outside_{name}' for name in NAMES]


@pytest.mark.parametrize('name', NAMES)
def test_an_honest_plugin_passes(name, honest):
  kind, thorough = honest[f'outside_{name}'], name == 'gate'  # on every mesh
  failed = [r for r in testing.results(kind, thorough=thorough) if r.status == 'fail']
  assert not failed, '\n'.join(f'{r.property.name}: {r.reason}' for r in failed)


@pytest.mark.parametrize('kind', broken_plugins.FAILS, ids=lambda kind: kind.__name__)
def test_a_broken_plugin_fails_by_name(kind):
  expected = broken_plugins.FAILS[kind]
  results = testing.check_adapter(kind, only=expected)
  assert {r.property.name: r.status for r in results} == dict.fromkeys(expected, 'fail')
  assert all(r.reason for r in results)


# What no plugin can break by itself is broken here in the framework: {property: sabotage}.
SABOTAGE = {}


def breaks(name):
  def add(sabotage):
    SABOTAGE[name] = sabotage
    return sabotage

  return add


def _copied(tree):
  return jax.tree.map(lambda a: a + 0, tree)


@breaks('detach_gives_back_base')
def copy_the_base(monkeypatch, case):
  del monkeypatch
  case.random = case.random.replace(base=_copied(case.random.base))


@breaks('costs_its_own_bytes')
def copy_the_base_of_one(monkeypatch, case):
  del monkeypatch
  case.fresh = case.fresh.replace(base=_copied(case.fresh.base))


@breaks('only_the_adapter_changes')
def train_the_base(monkeypatch, case):
  del monkeypatch
  moved = jax.tree.map(lambda a: a * jnp.asarray(1.001, a.dtype), case.fresh.base)
  case.trained = case.fresh.replace(base=moved)


@breaks('frozen_arrays_stay')
def train_all(monkeypatch, case):
  del monkeypatch
  case.trained = case.fresh.replace(adapter=jax.tree.map(lambda a: a + 1, case.fresh.adapter))


@breaks('counts_what_it_trains')
def count_the_frozen(monkeypatch, case):
  del case
  monkeypatch.setattr(
    _parts, 'trainable', lambda parts: jax.tree.map(lambda a: True, parts.adapter)
  )


@breaks('a_taken_name_is_refused')
def rename(monkeypatch, case):
  del case
  attach, names = _attach.attach, iter(('first', 'second'))
  monkeypatch.setattr(
    _attach, 'attach', lambda m, a, **more: attach(m, a, **(more | {'name': next(names)}))
  )


@breaks('detaching_one_leaves_the_others')
def detach_the_wrong_one(monkeypatch, case):
  del case
  detach = _attach.detach
  monkeypatch.setattr(_attach, 'detach', lambda m, name: detach(m, 'second'))


@breaks('arrays_are_sharded_like_their_kernel')
def replicate(monkeypatch, case):
  del case

  monkeypatch.setattr(_specs, 'factor_spec', lambda dims, kernel: jax.P(*(None for _ in dims)))


@breaks('same_on_every_mesh')
def place_another_model(monkeypatch, case):
  del case

  def other(mesh, sizes):
    del mesh
    return testing.StackModel(sizes, seed=1)

  monkeypatch.setattr(sharded, '_placed', other)


@breaks('comes_back_from_disk')
def load_zeros(monkeypatch, case):
  del case
  stacked = adapter_values._stacked
  monkeypatch.setattr(
    adapter_values, '_stacked', lambda *args: jax.tree.map(jnp.zeros_like, stacked(*args))
  )


@breaks('divides_as_claimed')
def name_a_quotient_that_is_not_there(monkeypatch, case):
  del case
  monkeypatch.setattr(_adapter, 'divided', lambda adapter: ('in/rank',))


@breaks('rows_can_differ_as_claimed')
def add_one_where_rows_are_mapped(monkeypatch, case):
  del case
  vmap = jax.vmap
  monkeypatch.setattr(jax, 'vmap', lambda f, *args, **kwargs: vmap(lambda *x: f(*x) + 1))


@breaks('experts_as_claimed')
def expect_nothing_of_an_expert(monkeypatch, case):
  del case
  monkeypatch.setattr(claims, '_one_expert', lambda case, layer, expert, x: 0 * x)


@breaks('quantized_as_claimed')
def give_the_numbers_from_before(monkeypatch, case):
  del case
  monkeypatch.setattr(quant, 'dequantize', lambda coded: claims._Layer((16, 16)))


@pytest.mark.parametrize('name', SABOTAGE)
def test_a_broken_framework_fails_by_name(name, monkeypatch):
  kind = _registry.adapters.get('lora')
  case = testing.Case(kind)
  assert case.random is not None
  (claim,) = testing.select([name])
  assert testing.check(claim, case).status == 'pass'
  case = testing.Case(kind)
  SABOTAGE[name](monkeypatch, case)
  result = testing.check(claim, case)
  assert (result.status, bool(result.reason)) == ('fail', True)


def test_every_property_can_fail():
  shown = {name for names in broken_plugins.FAILS.values() for name in names} | set(SABOTAGE)
  assert shown == {p.name for p in testing.properties()}


def test_every_property_says_its_claim_in_one_line():
  for claim in testing.properties():
    assert claim.line.endswith('.'), claim.name
    assert claim.check.__doc__.count('\n') == 0, claim.name


def test_an_unknown_property_is_refused_with_the_nearest():
  with pytest.raises(ValueError, match=r"No property 'fuse_equal'; did you mean 'fuse_equals"):
    testing.select(['fuse_equal'])


def test_a_type_without_defaults_is_refused():
  class Sized(broken_plugins.LowRank):
    width: int

  with pytest.raises(ValueError, match='fields without a default: width; give an instance'):
    testing.Case(dataclasses.dataclass(frozen=True, kw_only=True)(Sized))

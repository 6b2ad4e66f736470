"""Group H: which layers patterns name, strictly; experts and embeddings; what is refused."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _registry, _sites, testing
from peftlab.plugins.lora import LoRA

pytestmark = pytest.mark.usefixtures('quick_compiles')


def linear():
  return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


class Attention(nnx.Module):
  def __init__(self):
    self.q_proj, self.xq_proj, self.o_proj = linear(), linear(), linear()


class Model(nnx.Module):
  def __init__(self):
    self.embed = nnx.Embed(7, 4, rngs=nnx.Rngs(0))
    self.layers = nnx.List([Attention() for _ in range(2)])
    self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    self.lm_head = linear()


ALL = [f'layers.{i}.{n}' for i in (0, 1) for n in ('o_proj', 'q_proj', 'xq_proj')]
# (where, exclude) -> paths
NAMED = {
  ('all-linear', ()): ALL,
  ('all-embeddings', ()): ['embed'],
  ('q_proj', ()): ['layers.0.q_proj', 'layers.1.q_proj'],  # never xq_proj
  (('q_proj', 'o_proj'), ()): [p for p in ALL if 'xq' not in p],
  ('layers.1.q_proj', ()): ['layers.1.q_proj'],
  ('1.q_proj', ()): ['layers.1.q_proj'],
  (r'layers\.\d+\.x?q_proj', ()): [p for p in ALL if 'o_proj' not in p],
  (r'layers\.0\..*', ()): ALL[:3],
  ('lm_head', ()): ['lm_head'],
  ('embed', ()): ['embed'],
  (('all-linear', 'embed', 'lm_head'), ()): sorted(['embed', 'lm_head', *ALL]),
  ('all-linear', 'xq_proj'): [p for p in ALL if 'xq' not in p],
  ('all-linear', (r'layers\.0\..*', 'o_proj')): ['layers.1.q_proj', 'layers.1.xq_proj'],
  (('q_proj', 'q_proj'), ()): ['layers.0.q_proj', 'layers.1.q_proj'],
}


@pytest.mark.parametrize('case', NAMED, ids=str)
def test_patterns_name_layers(case):
  where, exclude = case
  chosen = _sites.select(_sites.sites(Model()), where, exclude)
  assert sorted(site.name for site in chosen) == sorted(NAMED[case])


BAD = {
  'no layer': ('q_porj', (), "^where='q_porj' matches no layer; did you mean 'q_proj'"),
  'the end of a word': ('proj', (), "^where='proj' matches no layer"),
  'the start of a path': ('layers', (), "^where='layers' matches no layer"),
  'in part': (('q_proj', 'kproj'), (), "^where='kproj' matches no layer"),
  'exclude': ('all-linear', 'lm_haed', "^exclude='lm_haed' matches no layer; .*'lm_head'"),
  'nothing is left': ('q_proj', 'q_proj', "^where='q_proj' without exclude='q_proj' leaves no"),
  'nothing is asked': ((), (), r'^where=\(\) without exclude=\(\) leaves no layer to adapt'),
  'no word': ((3,), (), '^where takes strings, given 3'),
  'no expression': ('layers.(', (), r"^'layers.\(' is not a path or a regular expression"),
  'all-liner': ('all-liner', (), "did you mean 'all-linear'"),
  'no linear layer': ((r'embed', 'all-liner'), (), "did you mean 'all-linear'"),
  'a norm': ('norm', (), "^where='norm' matches no layer"),
}


@pytest.mark.parametrize('case', BAD)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest(case):
  where, exclude, message = BAD[case]
  model = Model()
  before = peftlab.split(model)
  with pytest.raises(ValueError, match=message):
    peftlab.attach(model, LoRA(rank=2), where=where, exclude=exclude)
  assert peftlab.split(model).graph == before.graph


def test_a_model_that_is_one_layer_is_a_site():
  (site,) = _sites.sites(linear())
  assert (site.name, site.path, site.sizes) == ('Linear', (), {'in': 4, 'out': 4, 'taps': 1})
  model, _ = peftlab.attach(linear(), LoRA(rank=2))
  assert model.adapters[0].a.shape == (4, 2)


def test_a_stack_of_experts_is_a_target_like_any_other():
  """Kernels [experts, in, out] under layers: one adapter per layer and expert."""

  class Layer(nnx.Module):
    def __init__(self, rngs):
      self.experts = peftlab.stack(
        lambda r: nnx.Linear(4, 6, use_bias=False, rngs=r), 3, rngs=rngs, name='experts'
      )

  model, report = peftlab.attach(peftlab.stack(Layer, 2, rngs=0), LoRA(rank=2))
  assert report.rows[0].slots == {'a': (2, 3, 4, 2), 'b': (2, 3, 2, 6), 'scale': (2, 3)}
  assert report.trainable == 2 * 3 * 2 * (4 + 6)
  a = np.asarray(model.experts.adapters[0].a[...]).reshape(6, -1)
  assert len({row.tobytes() for row in a}) == 6


def test_a_layer_that_is_no_kernel_is_left_out_aloud():
  class Grouped(nnx.Module):
    def __init__(self):
      self.linear = linear()
      self.conv = nnx.Conv(4, 4, (1,), feature_group_count=2, rngs=nnx.Rngs(0))

  with pytest.warns(UserWarning, match='conv cannot be adapted: A convolution with feature groups'):
    _, report = peftlab.attach(Grouped(), LoRA(rank=2))
  assert [row.path for row in report.rows] == ['linear']


NO_KERNELS = (
  lambda: nnx.Conv(4, 4, (1,), feature_group_count=2, rngs=nnx.Rngs(0)),
  lambda: nnx.LinearGeneral(4, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0)),
)


@pytest.mark.parametrize('make', NO_KERNELS)
def test_a_pattern_for_a_layer_that_is_no_kernel_is_told_why(make):
  with (
    pytest.warns(UserWarning, match='cannot be adapted'),
    pytest.raises(ValueError, match=r'matches no layer that LoRA goes on: \w+ cannot be adapted\.'),
  ):
    peftlab.attach(make(), LoRA(rank=2), where='.*')


def test_a_type_goes_on_the_layers_that_it_declares():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class OfTables(LoRA):
    default_where = 'all-embeddings'

  _, report = peftlab.attach(Model(), OfTables(rank=2))
  assert [row.path for row in report.rows] == ['embed']
  _, report = peftlab.attach(Model(), OfTables(rank=2), where='q_proj')
  assert [row.path for row in report.rows] == ['layers.0.q_proj', 'layers.1.q_proj']
  with pytest.raises(ValueError, match=r"^where='all-embeddings' matches no layer"):
    peftlab.attach(linear(), OfTables(rank=2))


def test_trainable_tokens_go_on_the_embedding():
  kind = _registry.adapters.get('trainable_tokens')
  _, report = peftlab.attach(Model(), kind(tokens=(1, 3)))
  assert [row.path for row in report.rows] == ['embed']


def test_a_norm_is_refused_with_the_types_that_go_on_norms():
  with pytest.raises(ValueError, match=r'goes on: norm is a norm\. Types that go on norms: .*bias'):
    peftlab.attach(Model(), LoRA(rank=2), where=('q_proj', 'norm'))


def test_the_nearest_layer_is_compared_without_case():
  with pytest.raises(ValueError, match=r"did you mean '0\.q_proj'"):
    peftlab.attach(Model(), LoRA(rank=2), where='0.Q_proj')


def test_a_layer_held_twice_is_adapted_once():
  class Tied(nnx.Module):
    def __init__(self):
      self.first = linear()
      self.second = self.first

  model, report = peftlab.attach(Tied(), LoRA(rank=2))
  assert len(report.rows) == 1
  assert model.first is model.second
  assert len(jax.tree.leaves(peftlab.split(model).adapter)) == 3


def test_different_ranks_at_different_layers_under_one_name():
  """Rank and alpha patterns are attach calls: each names its layers."""
  model, _ = peftlab.attach(Model(), LoRA(rank=2, alpha=4.0), where='q_proj')
  model, _ = peftlab.attach(model, LoRA(rank=3, alpha=30.0), where='o_proj')
  q, o = model.layers[0].q_proj.adapters[0], model.layers[0].o_proj.adapters[0]
  assert (q.a.shape, o.a.shape) == ((4, 2), (4, 3))
  assert (float(q.scale[...]), float(o.scale[...])) == (2.0, 10.0)


def test_the_heads_are_left_alone_by_all_linear():
  model = testing.ZooModel()
  _, report = peftlab.attach(model, LoRA(rank=2))
  assert report.missed == ('head',)
  tokens = jnp.zeros((1, 3), jnp.int32)
  assert model(tokens).shape == (1, 3, 7)

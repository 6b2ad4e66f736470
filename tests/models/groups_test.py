"""Layers of several kinds: how they are cut into stacks, and that the cut changes nothing."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, appliers
from peftlab.formats import adapter_folder, layer_names
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import groups
from peftlab.models.config import DecoderConfig, Delta
from peftlab.models.decoder import Decoder
from peftlab.models.load import load_model
from peftlab.plugins.lora import LoRA
from tests.models import family_cases as cases
from tests.models import goldens

pytestmark = pytest.mark.usefixtures('quick_compiles')

CUTS = {
  'aaa': [('a3', 1)],
  'abb': [('a1', 1), ('b2', 1)],
  'aaabaaab': [('a3 b1', 2)],
  'aaabaa': [('a3', 1), ('b1', 1), ('a2', 1)],  # once is no pattern
  'aabaaba': [('a2 b1', 2), ('a1', 1)],
  'aabaabb': [('a2 b1', 2), ('b1', 1)],
  'abababab': [('a1 b1', 4)],
  'aaabbbbb': [('a3', 1), ('b5', 1)],
  'abcbcbc': [('a1', 1), ('b1 c1', 3)],
}


@pytest.mark.parametrize('kinds', CUTS)
def test_kinds_are_cut_into_runs_and_patterns(kinds):
  found = groups.group_kinds(list(kinds))
  told = [(' '.join(f'{k}{n}' for k, n in g.runs), g.repeats) for g in found]
  assert told == CUTS[kinds]
  numbers = [g.numbers(run).ravel() for g in found for run in range(len(g.runs))]
  assert sorted(np.concatenate(numbers).tolist()) == list(range(len(kinds)))
  for group in found:
    for run, (kind, _) in enumerate(group.runs):
      assert {kinds[i] for i in group.numbers(run).ravel()} == {kind}


def test_the_numbers_of_a_pattern_are_by_period():
  (group,) = groups.group_kinds(list('aabaab'))
  np.testing.assert_array_equal(group.numbers(0), [[0, 1], [3, 4]])
  np.testing.assert_array_equal(group.numbers(1), [[2], [5]])


@pytest.fixture(scope='module')
def patterned(tmp_path_factory):
  """A qwen3_next of 5 layers: (delta, attention) x 2, delta; its tensors are the golden's."""
  source = HfWeights(goldens.HF / 'qwen3_next')
  layer = {0: 0, 1: 3, 2: 1, 3: 3, 4: 2}
  tensors: dict = {name: None for name in source if '.layers.' in name}
  for new, old in layer.items():
    for name in source:
      if name.startswith(f'model.layers.{old}.'):
        array = source[name]
        if new == 3:  # the golden has one layer of attention
          array = (array * np.asarray(0.5, array.dtype)).astype(array.dtype)
        tensors[name.replace(f'.layers.{old}.', f'.layers.{new}.')] = array
  config = {'num_hidden_layers': 5, 'full_attention_interval': 2}
  folder = tmp_path_factory.mktemp('pattern') / 'x'
  return goldens.edited('qwen3_next', folder, config, tensors)


def each_alone(kinds):
  """Every layer in a group of its own."""
  return tuple(groups.Group(start=i, runs=((kind, 1),)) for i, kind in enumerate(kinds))


def test_a_stack_of_periods_equals_layers_on_their_own(patterned, monkeypatch):
  nested = load_model(patterned)
  told = [(len(g.runs), g.repeats) for g in groups.groups(nested.config)]
  assert told == [(2, 2), (1, 1)]
  tokens, _ = cases.golden('qwen3_next')
  found = cases.logits_of(peftlab.split(nested), tokens)
  nested.applier = appliers.Sequential(remat='full')
  by_layer = cases.logits_of(peftlab.split(nested), tokens)
  monkeypatch.setattr(groups, 'group_kinds', each_alone)
  flat = load_model(patterned)
  assert len(flat.layers) == 5
  expected = np.asarray(cases.logits_of(peftlab.split(flat), tokens))
  assert cases.distance(found, expected) < 1e-5
  assert cases.distance(by_layer, expected) < 1e-5


def test_every_layer_of_a_pattern_has_its_name(patterned):
  names = load_model(patterned).hf_names()
  delta, attention = 'linear_attn.in_proj_ba', 'self_attn.q_proj'
  for i in range(5):
    own, theirs = ('attn.q', attention) if i in (1, 3) else ('delta.ba', delta)
    assert names[f'layers.{i}.{own}'] == f'model.layers.{i}.{theirs}'
    expert = f'model.layers.{i}.mlp.experts.5.up_proj'
    assert names[f'layers.{i}.mlp.experts.5.up'] == expert
  assert 'layers.0.attn.q' not in names
  assert len(set(names.values())) == len(names)


def adapter_arrays(model):
  """{layer: its factor b}, by the names that layers have on disk."""
  found = {}
  for place in layer_names.places(model).values():
    for attached in getattr(place.site.layer, 'adapters', ()):
      stack = attached.b.get_metadata()['stack']
      found[place.name] = layer_names.take(np.asarray(attached.b[...]), stack, place.index)
  return found


def test_an_adapter_of_a_pattern_is_per_layer_on_disk(patterned, tmp_path, monkeypatch):
  where = ('attention', 'experts', 'mlp')
  model, _ = peftlab.attach(load_model(patterned), LoRA(rank=2), where=where)
  parts, draw = peftlab.split(model), np.random.default_rng(0)
  random = jax.tree.map(lambda a: jnp.asarray(draw.normal(size=a.shape), a.dtype), parts.adapter)
  model = peftlab.merge(parts.replace(adapter=random))
  expected = adapter_arrays(model)
  assert {'layers.3.attn.o', 'layers.4.delta.out', 'layers.2.mlp.experts.5.up'} <= set(expected)
  adapter_folder.save_adapter(model, tmp_path / 'adapter')
  monkeypatch.setattr(groups, 'group_kinds', each_alone)
  again = adapter_folder.load_adapter(load_model(patterned), tmp_path / 'adapter')
  chex.assert_trees_all_equal(adapter_arrays(again), expected)


SMALL = DecoderConfig(
  family='qwen3_next',
  vocab=11,
  layers=5,
  embed=8,
  mlp=12,
  q_heads=2,
  kv_heads=1,
  head_dim=4,
  max_length=16,
  mixers=('delta', 'attention', 'delta', 'attention', 'delta'),
  delta=Delta(key_heads=1, value_heads=2, key_dim=4, value_dim=3, window=2),
)


def test_gradients_reach_every_adapter_of_a_pattern():
  model, _ = peftlab.attach(Decoder(SMALL, rngs=nnx.Rngs(0)), LoRA(rank=2))
  tokens, found = jnp.arange(6)[None, :], []
  for applier in (appliers.Scan(remat='full'), appliers.Sequential()):
    model.applier = applier
    parts = peftlab.split(model)
    ones = jax.tree.map(lambda a: jnp.full_like(a, 0.1), parts.adapter)

    def loss(adapter, parts=parts):
      return jnp.mean(peftlab.merge(parts.replace(adapter=adapter))(tokens) ** 2)

    found.append(jax.jit(jax.grad(loss))(ones))
  scanned, by_layer = (_parts.flat(grads) for grads in found)
  for path, grad in scanned.items():
    np.testing.assert_allclose(grad, by_layer[path], rtol=1e-3, atol=1e-6, err_msg=str(path))
    if path[-1] in ('a', 'b'):
      assert float(jnp.max(jnp.abs(grad))) > 0, path

"""Every linear weight of every family is adapted by 'all-linear' or left out by name."""

from flax import nnx
import pytest

import peftlab
from peftlab import _kernel, _parts, _registry, _sites
from peftlab.models import groups
from peftlab.models.load import outline
from peftlab.plan import base
from peftlab.plugins.lora import LoRA
from peftlab.train.config import BaseConfig
from tests.models import family_cases as cases
from tests.models import goldens

# What 'all-linear' leaves alone, by the last words of its path.
EXCLUDED = {
  'head': 'the head',
  'embed': 'an embedding',
  'table': 'an embedding',
  'router.proj': 'a router',
  'shared_gate': 'a router between an MLP and none',
}
# Arrays of two and more dimensions (without layers) that are no linear map.
NOT_LINEAR = {'conv': 'one number per channel and tap'}
WORDS = {
  'attention': ('attn', 'delta'),
  'mlp': ('mlp.gate', 'mlp.up', 'mlp.down', 'dense', 'shared', 'token_embed', 'token_embeds'),
  'experts': ('experts',),
  'router': ('router', 'shared_gate'),
}


def weights(model):
  """The path of the layer of every array of two and more dimensions, stack axes aside."""
  found = {}
  for path, variable in _parts.variables(model).items():
    stack = len(variable.get_metadata().get('stack', ()))
    if variable.ndim - stack >= 2 and path[-1] != 'bias':
      found[path[:-1]] = path[-1]
  return found


def named(path, words):
  name = _parts.path_name(groups.plain_path(path))
  return any(f'.{name}.'.find(f'.{word}.') >= 0 for word in words)


# Families without a folder of their own among the goldens, by a model of each.
ALSO = {'smollm2': 'smollm2-135m', 'glassllm': 'package:glassllm/en'}


def test_every_family_is_walked():
  assert set(_registry.families.names()) == set(cases.FAMILIES) | set(ALSO)


@pytest.mark.parametrize('family', ALSO)
def test_expected_equals_matched_in_other_families(family):
  assert_covered(base.outline(BaseConfig(source=ALSO[family])))


@pytest.mark.parametrize('name', cases.GOLDENS)
def test_expected_equals_matched(name):
  assert_covered(outline(goldens.HF / name))


def assert_covered(model):
  matrices = weights(model)
  expected = {
    path
    for path, leaf in matrices.items()
    if leaf not in NOT_LINEAR and not named((*path, leaf), EXCLUDED)
  }
  adapted, report = peftlab.attach(model, LoRA(rank=1))
  matched = {
    path
    for path, node in nnx.iter_graph(adapted)
    if isinstance(node, nnx.Module) and hasattr(node, 'adapters')
  }
  assert matched == expected
  assert len(report.rows) == len(expected)
  # Every other matrix is a site that can be named, or no linear map.
  sites = {site.path for site in _sites.sites(model)}
  for path, leaf in matrices.items():
    assert path in sites or leaf in NOT_LINEAR, path


@pytest.mark.parametrize('name', cases.UNROLLED)
def test_words_name_the_layers_of_one_role(name):
  model = outline(goldens.HF / name)
  every = {site.path for site in _sites.sites(model) if _kernel.layer_type(site.layer).linear}
  left = {path for path in every if path[-1] != 'head'}
  for word, parts in WORDS.items():
    if not any(named(path, parts) for path in every):
      with pytest.raises(ValueError, match=f"where='{word}' matches no layer"):
        peftlab.attach(model, LoRA(rank=1), where=word)
      continue
    chosen = {s.path for s in _sites.select(_sites.sites(model), word)}
    assert chosen <= left
    assert all(named(path, parts) for path in chosen), word
    left -= chosen
  assert not left  # each layer has one role


def test_a_router_is_adapted_where_it_is_named():
  sites = _sites.sites(outline(goldens.HF / 'mixtral'))
  assert {s.name for s in _sites.select(sites, 'router')} == {'layers.mlp.router.proj'}
  alone = {s.path for s in _sites.select(sites, 'all-linear')}
  both = {s.path for s in _sites.select(sites, ('all-linear', 'router'))}
  assert both - alone == {('layers', 'mlp', 'router', 'proj')}

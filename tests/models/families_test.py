"""Every family computes what transformers computes: scanned, layer by layer, and with a cache."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _specs, appliers
from peftlab.models.experts import ExpertDense
from peftlab.plugins.lora import LoRA
from tests.models import family_cases as cases

pytestmark = pytest.mark.usefixtures('quick_compiles')

TOLERANCE = 1e-4  # float32 of random weights; measured are 1e-6 to 8e-6


@pytest.mark.parametrize('name', [n for n in cases.SCANNED if n not in cases.HERE])
def test_logits_equal_transformers(name):
  tokens, expected = cases.golden(name)
  assert cases.distance(cases.logits_of(cases.loaded(name), tokens), expected) < TOLERANCE


@pytest.mark.parametrize('name', cases.UNROLLED)
def test_sequential_equals_transformers(name):
  tokens, expected = cases.golden(name)
  model = cases.model_of(name, appliers.Sequential())
  assert cases.distance(cases.logits_of(peftlab.split(model), tokens), expected) < TOLERANCE


@pytest.mark.parametrize('name', cases.PIPED)
def test_a_pipeline_equals_transformers(name):
  tokens, expected = cases.golden(name)
  tokens, expected = (
    np.tile(a, (4 // tokens.shape[0], 1, 1)[: a.ndim]) for a in (tokens, expected)
  )
  mesh = _specs.make_mesh({'stage': 2}, jax.devices()[:2])
  model = cases.model_of(name, appliers.Pipeline(microbatches=2, rest='first'))
  model.lay_out(mesh)
  with jax.set_mesh(mesh):
    found = cases.logits_of(peftlab.split(model), jnp.asarray(tokens))
  assert cases.distance(found, expected) < TOLERANCE


@jax.jit
def decoded(parts, tokens):
  """Logits of a text: all but its last 4 tokens at once, then one by one, through a cache."""
  batch, length = tokens.shape
  model = peftlab.merge(parts).init_cache(batch, length)
  cut = length - 4
  # Padding stands behind the text and at no position.
  padded = jnp.pad(tokens[:, :cut], ((0, 0), (0, 3)))
  places = jnp.pad(jnp.arange(cut), (0, 3), constant_values=-1)
  first = model(padded, positions=places[None, :])[:, :cut]
  after = peftlab.split(model)

  def step(state, place):
    model = peftlab.merge(after.replace(state=state))
    token = jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
    logits = model(token, positions=place[None, None])
    return peftlab.split(model).state, logits[:, 0]

  _, rest = jax.lax.scan(step, after.state, jnp.arange(cut, length))
  return jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], axis=1)


@pytest.mark.parametrize('name', cases.CACHED)
def test_decoding_with_a_cache_equals_transformers(name):
  tokens, expected = cases.golden(name)
  found = decoded(cases.loaded(name), tokens[:, :20])
  assert cases.distance(found, expected[:, :20]) < TOLERANCE


def test_every_golden_is_compared():
  assert {*cases.SCANNED, *cases.UNROLLED, *cases.CACHED} == set(cases.GOLDENS)


@pytest.mark.parametrize('name', cases.PACKED)
def test_packed_texts_do_not_see_each_other(name):
  tokens, expected = cases.golden(name)
  cut, model = 7, cases.model_of(name)
  # The begin of the second text, then the first text in the same row.
  row = jnp.concatenate([tokens[1:, :cut], tokens[:1, : 20 - cut]], axis=1)
  ids = jnp.asarray([[3] * cut + [1] * (20 - cut)])
  places = jnp.concatenate([jnp.arange(cut), jnp.arange(20 - cut)])[None, :]
  packed = jax.jit(lambda p: peftlab.merge(p)(row, positions=places, segment_ids=ids))
  found = packed(peftlab.split(model))[0]
  assert cases.distance(found[cut:], expected[0, : 20 - cut]) < TOLERANCE
  assert cases.distance(found[:cut], expected[1, :cut]) < TOLERANCE


@pytest.mark.parametrize('name', cases.WITH_EXPERTS)
def test_adapters_of_experts_are_a_change_of_each_kernel(name):
  tokens, plain = cases.golden(name)
  model, _ = peftlab.attach(cases.model_of(name), LoRA(rank=2), where='experts')
  parts, draw = peftlab.split(model), np.random.default_rng(0)
  random = jax.tree.map(
    lambda a: jnp.asarray(draw.normal(size=a.shape, scale=0.3), a.dtype), parts.adapter
  )
  adapted = parts.replace(adapter=random)
  found = cases.logits_of(adapted, tokens)
  changed = peftlab.merge(cases.loaded(name))
  layers = dict(nnx.iter_graph(changed))
  for path, node in nnx.iter_graph(peftlab.merge(adapted)):
    if isinstance(node, ExpertDense):
      a, b, scale = (np.asarray(getattr(node.adapters[0], n)[...]) for n in ('a', 'b', 'scale'))
      change = np.einsum('...ir,...ro->...io', a * scale[..., None, None], b)
      layers[path].kernel.set_raw_value(node.kernel[...] + change)
  expected = np.asarray(cases.logits_of(peftlab.split(changed), tokens))
  assert cases.distance(found, expected) < TOLERANCE
  assert cases.distance(found, plain) > 1e-2

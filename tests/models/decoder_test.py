"""The decoder: its layout, its appliers, its cache, packing, and its errors."""

import dataclasses
import functools

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, appliers
from peftlab.models.config import Rope
from peftlab.models.decoder import Decoder
from tests.models.small import SMALL

RICH = dataclasses.replace(
  SMALL,
  norm_unit_offset=True,
  activation='gelu_tanh',
  tied=False,
  embed_scale=3.0,
  rope=Rope(theta=1e6, scaling='linear', factor=8.0),
  local_rope=Rope(),
  rope_layout='interleaved',
  windows=(4, 0, 3),
  attention_scale=0.3,
  attention_softcap=2.0,
  logit_softcap=3.0,
  qk_norm=True,
  post_norms=True,
  qkv_bias=True,
  o_bias=True,
  mlp_bias=True,
)
CONFIGS = {'plain': SMALL, 'rich': RICH}


pytestmark = pytest.mark.usefixtures('quick_compiles')


def abstract(config):
  return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


@functools.cache
def parts_of(name):
  """A decoder whose every weight counts: norms and biases are random too."""

  def build():
    model, rngs = Decoder(CONFIGS[name], rngs=nnx.Rngs(0)), nnx.Rngs(1)
    for variable in _parts.variables(model).values():
      if variable.ndim < 3 and not isinstance(variable, peftlab.Constant):
        variable[...] += 0.5 * jax.random.normal(rngs.params(), variable.shape)
    return peftlab.split(model)

  return jax.jit(build)()


def decoder(name, applier=appliers.Scan()):  # noqa: B008, it is frozen
  model = peftlab.merge(parts_of(name))
  model.applier = applier
  return model


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, SMALL.vocab, (2, 12)), jnp.int32)


@jax.jit
def run(parts, tokens, positions=None, segment_ids=None):
  """Logits, and the state after the call."""
  model = peftlab.merge(parts)
  logits = model(tokens, positions=positions, segment_ids=segment_ids)
  return logits, peftlab.split(model).state


def logits_of(model, *args, **kwargs):
  return run(peftlab.split(model), *args, **kwargs)[0]


def test_the_layout_of_the_plain_decoder():
  shapes = jax.tree.map(lambda a: a.shape, peftlab.split(abstract(SMALL)).base)
  assert shapes == {
    'embed': {'table': (29, 12)},
    'layers': {
      'attn_norm': {'scale': (3, 12)},
      'attn': {
        'q': {'kernel': (3, 12, 4, 6)},
        'k': {'kernel': (3, 12, 2, 6)},
        'v': {'kernel': (3, 12, 2, 6)},
        'o': {'kernel': (3, 4, 6, 12)},
        'rope_frequencies': (3, 3),
      },
      'mlp_norm': {'scale': (3, 12)},
      'mlp': {
        'gate': {'kernel': (3, 12, 20)},
        'up': {'kernel': (3, 12, 20)},
        'down': {'kernel': (3, 20, 12)},
      },
    },
    'norm': {'scale': (12,)},
  }


def test_what_the_options_add_to_the_layout():
  plain, rich = (
    {_parts.path_name(p) for p in _parts.variables(abstract(c))} for c in (SMALL, RICH)
  )
  assert rich - plain == {
    'head.kernel',
    'layers.attn.q_norm.scale',
    'layers.attn.k_norm.scale',
    'layers.attn.window',
    'layers.post_attn_norm.scale',
    'layers.post_mlp_norm.scale',
    *(f'layers.attn.{n}.bias' for n in 'qkvo'),
    *(f'layers.mlp.{n}.bias' for n in ('gate', 'up', 'down')),
  }
  assert plain <= rich


def test_every_dimension_of_every_array_has_a_name():
  model = abstract(RICH)
  for path, variable in _parts.variables(model).items():
    axes = variable.get_metadata()['axes']
    assert len(axes) == variable.ndim, path
    assert (axes[:1] == ('layers',)) == (path[0] == 'layers'), path


def test_constants_differ_per_layer():
  attn = decoder('rich').layers.attn
  np.testing.assert_array_equal(attn.window[...], [4, 0, 3])
  local, full = np.asarray(attn.rope_frequencies[...])[:2]
  np.testing.assert_allclose(local, [1, 1e4 ** (-1 / 3), 1e4 ** (-2 / 3)], rtol=1e-6)
  np.testing.assert_allclose(full * 8, [1, 1e-2, 1e-4], rtol=1e-6)


@pytest.mark.parametrize('name', CONFIGS)
def test_scan_equals_sequential(name):
  found = [
    logits_of(decoder(name, applier), TOKENS)
    for applier in (appliers.Scan(), appliers.Sequential(), appliers.Scan(remat='full'))
  ]
  chex.assert_shape(found[0], (2, 12, SMALL.vocab))
  chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', CONFIGS)
@pytest.mark.parametrize('applier', (appliers.Scan(), appliers.Sequential()))
def test_cached_decoding_equals_the_uncached_forward(name, applier):
  model = decoder(name, applier)
  expected = logits_of(model, TOKENS)
  parts, found = peftlab.split(model.init_cache(2, 16)), []
  for start, stop in ((0, 5), (5, 6), (6, 7), (7, 12)):
    positions = jnp.arange(start, stop)[None, :]
    logits, state = run(parts, TOKENS[:, start:stop], positions)
    parts = parts.replace(state=state)
    found.append(logits)
  chex.assert_trees_all_close(jnp.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-5)


def test_rows_of_a_cache_have_positions_of_their_own():
  model = decoder('rich')
  expected = logits_of(model, TOKENS)
  # Texts of 7 and 4 tokens, the second padded; then one more token each.
  parts = peftlab.split(model.init_cache(2, 16))
  _, state = run(parts, TOKENS[:, :7].at[1, 4:].set(0), jnp.arange(7)[None, :])
  last = jnp.asarray([7, 4])
  new = jnp.take_along_axis(TOKENS, last[:, None], axis=1)
  logits, _ = run(parts.replace(state=state), new, last[:, None])
  chex.assert_trees_all_close(logits[0, 0], expected[0, 7], rtol=1e-4, atol=1e-5)
  chex.assert_trees_all_close(logits[1, 0], expected[1, 4], rtol=1e-4, atol=1e-5)


def test_a_cache_is_a_new_model_on_the_same_arrays():
  model = decoder('plain')
  graph = peftlab.split(model).graph
  cached = model.init_cache(2, 8)
  assert peftlab.assert_base_shared(model, cached) == '12/12'
  assert peftlab.split(model).graph == graph
  caches = peftlab.split(cached).state['layers']['attn']
  assert jax.tree.map(jnp.shape, caches) == dict.fromkeys(('cached_k', 'cached_v'), (3, 2, 8, 2, 6))


@pytest.mark.parametrize('name', CONFIGS)
def test_packed_segments_equal_texts_on_their_own(name):
  model = decoder(name)
  segment_ids = jnp.asarray([[1] * 5 + [2] * 7, [1] * 7 + [2] * 5])
  positions = jnp.asarray([[*range(5), *range(7)], [*range(7), *range(5)]])
  packed = logits_of(model, TOKENS, positions, segment_ids)
  for row, cut in ((0, 5), (1, 7)):
    alone = [
      logits_of(model, part) for part in (TOKENS[row : row + 1, :cut], TOKENS[row : row + 1, cut:])
    ]
    expected = jnp.concatenate(alone, axis=1)[0]
    chex.assert_trees_all_close(packed[row], expected, rtol=1e-4, atol=1e-5)
  # RoPE only knows differences, so positions may also run on through a row.
  on = logits_of(model, TOKENS, None, segment_ids)
  chex.assert_trees_all_close(on, packed, rtol=1e-3, atol=1e-4)


def test_logits_of_hidden_states_are_the_logits():
  model = decoder('rich')
  hidden = model.hidden(TOKENS)
  chex.assert_shape(hidden, (2, 12, 12))
  chunks = [model.logits(hidden[:, i : i + 4]) for i in range(0, 12, 4)]
  chex.assert_trees_all_close(jnp.concatenate(chunks, axis=1), model(TOKENS), rtol=1e-5, atol=1e-5)


def test_activations_take_the_dtype_of_the_config_and_logits_are_float32():
  config = dataclasses.replace(RICH, dtype='bfloat16')
  model = abstract(config)
  graph, state = nnx.split(model)
  hidden = jax.eval_shape(lambda s: nnx.merge(graph, s).hidden(TOKENS), state)
  logits = jax.eval_shape(lambda s: nnx.merge(graph, s)(TOKENS), state)
  assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
  assert model.layers.attn.rope_frequencies.dtype == jnp.float32
  assert model.layers.mlp.up.kernel.dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ('cached', 'shapes', 'message'),
  (
    (False, dict(tokens=(3,)), r'tokens have shape \(3,\); expected an array \[batch, length\]'),
    (False, dict(tokens=(0, 3)), r'tokens have shape \(0, 3\); .*, neither of them 0\.'),
    (False, dict(tokens=(2, 0)), r'tokens have shape \(2, 0\); .*, neither of them 0\.'),
    (False, dict(tokens=(2, 3), positions=(2, 4)), r'positions have shape \(2, 4\); expected \(2'),
    (False, dict(tokens=(2, 3), segment_ids=(1, 3)), r'segment_ids have shape \(1, 3\); expected'),
    (True, dict(tokens=(2, 3)), 'positions are needed with a cache'),
    (True, dict(tokens=(2, 3), positions=(1, 3), segment_ids=(2, 3)), 'segment_ids cannot be used'),
    (True, dict(tokens=(1, 3), positions=(1, 3)), 'the cache is for batch 2 and length 8'),
    (True, dict(tokens=(2, 9), positions=(1, 9)), 'the cache is for batch 2 and length 8'),
  ),
)
def test_wrong_arguments_are_named(cached, shapes, message):
  model = decoder('plain')
  model = model.init_cache(2, 8) if cached else model
  arrays = {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}
  with pytest.raises(ValueError, match=message):
    model(arrays.pop('tokens'), **arrays)


@pytest.mark.parametrize(('batch', 'length'), ((0, 4), (1, 0), (1, 33)))
def test_a_cache_of_wrong_size_is_refused(batch, length):
  with pytest.raises(ValueError, match=r'between 1 and max_length \(32\)\.'):
    decoder('plain').init_cache(batch, length)


def test_tokens_are_an_array_of_whole_numbers():
  model = abstract(SMALL)
  with pytest.raises(ValueError, match=r'tokens are a list; expected an array \[batch, length\]'):
    jax.eval_shape(lambda: model([[1, 2]]))
  with pytest.raises(ValueError, match='tokens are float32; expected whole numbers'):
    jax.eval_shape(lambda: model(jnp.ones((1, 2))))


@pytest.mark.parametrize(
  ('token', 'position', 'cached', 'message'),
  (
    (29, None, False, 'tokens have 29; the vocabulary of the model is 0 to 28'),
    (-1, None, False, 'tokens have -1; the vocabulary of the model is 0 to 28'),
    (0, 32, False, 'positions have 32; those of the model are 0 to 31'),
    (0, -1, False, 'positions have -1; those of the model are 0 to 31'),
    (0, 8, True, 'positions have 8; those of the cache are -1 to 7'),
    (0, -2, True, 'positions have -2; those of the cache are -1 to 7'),
  ),
)
def test_tokens_and_positions_that_the_model_does_not_have_are_refused(
  token, position, cached, message
):
  model = decoder('plain')
  model = model.init_cache(2, 8) if cached else model
  tokens = np.zeros((2, 3), np.int32)
  tokens[1, 2] = token
  positions = None if position is None else np.array([[0, 1, position]])
  for of in (np.asarray, jnp.asarray):
    given = None if positions is None else of(positions)
    with pytest.raises(ValueError, match=message):
      model(of(tokens), positions=given)


def test_a_text_longer_than_the_model_reads_is_refused_also_under_a_trace():
  tokens = jnp.zeros((1, SMALL.max_length + 1), jnp.int32)
  message = 'tokens have length 33; the max_length of the model is 32'
  with pytest.raises(ValueError, match=message):
    decoder('plain')(tokens)
  with pytest.raises(ValueError, match=message):
    logits_of(decoder('plain'), tokens)

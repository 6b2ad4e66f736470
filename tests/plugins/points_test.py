"""Virtual tokens and activated LoRA on a tiny Llama, against PEFT 0.21.2 and against themselves."""

import dataclasses
import functools
import json
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import peftlab
from peftlab import _parts, appliers, serve
from peftlab.plugins.alora import ALoRA
from peftlab.plugins.lora import LoRA
from peftlab.plugins.p_tuning import PTuning
from peftlab.plugins.prefix import Prefix
from peftlab.plugins.prompt import Prompt
from peftlab.train import loop, run
from tests.plugins.zoo_cases import golden
from tests.plugins.zoo_test import layer_of
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_ranks')

GOLDENS = pathlib.Path(__file__).parent.parent / 'goldens'
ZOO = GOLDENS / 'peft_zoo'
TOLERANCE = 1e-5
POINTS = ('keys', 'values')


@functools.cache
def base():
  return peftlab.load_model(GOLDENS / 'peft_lora' / 'base')


@functools.cache
def arrays(name):
  with np.load(ZOO / name) as file:
    return dict(file)


@functools.cache
def tokens():
  return jnp.asarray(arrays('base/llama.npz')['tokens'], jnp.int32)


def close(actual, expected, what=''):
  expected = np.asarray(expected)
  bound = TOLERANCE * np.abs(expected).max()
  np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=bound, err_msg=what)


def put(attached, values):
  for slot, array in values.items():
    held = getattr(attached, slot)
    assert held.shape == array.shape, f'{slot}: {held.shape}, {array.shape}'
    held[...] = jnp.asarray(array)


def logits_and_gradients(model, cotangent):
  parts = peftlab.split(model)

  def total(adapter):
    y = peftlab.merge(parts.replace(adapter=adapter))(tokens())
    return (y * cotangent).sum(), y

  gradients, y = jax.jit(jax.grad(total, has_aux=True))(parts.adapter)
  return y, _parts.flat(gradients)


def prompt_of(group):
  return {'rows': arrays('prompt/random_encoder.npz')[f'{group}/prompt_encoder.embedding.weight']}


@functools.cache
def prompted():
  model, _ = peftlab.attach(base(), Prompt(count=3))
  put(model.inputs.adapters[0], prompt_of('encoder'))
  return model


def prefix_of(group, name):
  """{slot: array} once, and {point: {slot: array [layers, ...]}}, of PEFT's encoder."""
  held = arrays(f'prefix/{name}_encoder.npz')
  found = {
    k.removeprefix(f'{group}/prompt_encoder.'): a
    for k, a in held.items()
    if k.startswith(f'{group}/')
  }
  if name == 'plain':
    rows = found['embedding.weight'].reshape(3, 2, 2, 8)
    return {}, {p: {'rows': rows[:, :, i].transpose(1, 0, 2)} for i, p in enumerate(POINTS)}
  once = {'embed': found['embedding.weight'], 'b1': found['transform.0.bias']}
  once['w1'] = found['transform.0.weight'].T
  w2 = found['transform.2.weight'].reshape(2, 2, 8, 6)
  b2 = found['transform.2.bias'].reshape(2, 2, 8)
  own = {p: {'w2': w2[:, i].transpose(0, 2, 1), 'b2': b2[:, i]} for i, p in enumerate(POINTS)}
  return once, own


@functools.cache
def prefixed(name):
  model, report = peftlab.attach(base(), Prefix(count=3, hidden=6 * (name == 'projection')))
  once, own = prefix_of('encoder', name)
  put(model.layers.attn.keys.adapters[0], once)
  for point in POINTS:
    put(getattr(model.layers.attn, point).adapters[0], own[point])
  return model, report


MODULES = {'q': 'self_attn.q_proj', 'v': 'self_attn.v_proj', 'down': 'mlp.down_proj'}


@functools.cache
def invoked():
  adapter = ALoRA(rank=4, alpha=8, invocation=(7, 3))
  model, _ = peftlab.attach(base(), adapter, where=tuple(MODULES))
  held = load_file(ZOO / 'alora' / 'list' / 'adapter_model.safetensors')
  layers = {'q': model.layers.attn.q, 'v': model.layers.attn.v, 'down': model.layers.mlp.down}
  for name, path in MODULES.items():
    key = 'base_model.model.model.layers.{}.' + path + '.lora_{}.weight'
    put(
      layers[name].adapters[0],
      {s: np.stack([held[key.format(i, s.upper())].T for i in (0, 1)]) for s in 'ab'},
    )
  return model


def invocation_tokens():
  return jnp.asarray(arrays('alora/logits.npz')['tokens'], jnp.int32)


def every_model():
  return {'prompt': prompted(), 'prefix': prefixed('plain')[0], 'alora': invoked()}


def encoder_of(group, name):
  """{slot: array} of PEFT's encoder of p-tuning."""
  held = arrays(f'p_tuning/{name}_encoder.npz')
  found = {
    k.removeprefix(f'{group}/prompt_encoder.'): a
    for k, a in held.items()
    if k.startswith(f'{group}/')
  }
  slots = {'embed': found.pop('embedding.weight')}
  linear = {'0': '1', '2': '2', '4': '3'} if name == 'mlp' else {'0': '2', '2': '3'}
  kinds = {'weight_ih': 'w', 'weight_hh': 'u', 'bias_ih': 'b', 'bias_hh': 'c'}
  for key, array in found.items():
    module, _, rest = key.partition('.')
    if module == 'mlp_head':
      number, _, kind = rest.partition('.')
      slots['wb'[kind == 'bias'] + linear[number]] = array.T
    else:
      kind, _, number = rest.removesuffix('_reverse').rpartition('_l')
      way = 'backward' if rest.endswith('_reverse') else 'forward'
      slots[f'{way}{number}_{kinds[kind]}'] = array.T
  return slots


PROMPTS = {
  'prompt/random': (Prompt(count=3), prompt_of),
  'p_tuning/mlp': (PTuning(count=3, hidden=6), functools.partial(encoder_of, name='mlp')),
  'p_tuning/lstm': (
    PTuning(count=3, hidden=3, encoder='lstm'),
    functools.partial(encoder_of, name='lstm'),
  ),
}


@pytest.mark.parametrize('name', PROMPTS)
def test_virtual_tokens_are_those_of_peft(name):
  adapter, slots = PROMPTS[name]
  model, report = peftlab.attach(base(), adapter)
  put(model.inputs.adapters[0], slots('encoder'))
  facts = json.loads((ZOO / 'cases.json').read_text())
  assert report.trainable == facts[name]['trainable']
  kind, label = name.split('/')
  expected = arrays(f'{kind}/logits.npz')[label]  # of the virtual tokens too
  close(model(tokens()), expected[:, 3:])
  # PEFT's gradients are of the logits of the virtual tokens too: here a sequence of 15 without any.
  parts, bare = peftlab.split(model), peftlab.detach(model)
  cotangent = jnp.asarray(arrays('base/llama.npz')['cotangent'])

  def total(adapter):
    held = peftlab.merge(parts.replace(adapter=adapter))
    x = held.inputs(held.embed(tokens()))
    x = bare._run_layers(x, (jnp.arange(15)[None], None, None, None))
    return (bare.logits(bare.norm(x)) * cotangent).sum()

  gradients = _parts.flat(jax.jit(jax.grad(total))(parts.adapter))
  for slot, expected in slots('grad').items():
    close(gradients['inputs', 'adapters', 0, slot], expected, slot)


@pytest.mark.parametrize(('name', 'count'), (('plain', 96), ('projection', 302)))
def test_a_prefix_is_that_of_peft(name, count):
  model, report = prefixed(name)
  assert report.trainable == count
  cotangent = jnp.asarray(arrays('base/llama.npz')['cotangent'])[:, :12]
  y, gradients = logits_and_gradients(model, cotangent)
  close(y, arrays('prefix/logits.npz')[name])
  once, own = prefix_of('grad', name)
  for path, gradient in gradients.items():
    expected = once[path[-1]] if path[-1] in once else own[path[2]][path[-1]]
    close(gradient, expected, _parts.path_name(path))


def test_an_activated_lora_is_that_of_peft():
  given = invocation_tokens()
  y = invoked()(given)
  close(y, arrays('alora/logits.npz')['list'])
  # The invocation stands twice in the first row and nowhere in the second.
  close(y[1], base()(given)[1])
  close(y[0, :6], base()(given)[0, :6])
  assert np.abs(y[0, 6:] - base()(given)[0, 6:]).max() > 1e-2


def test_an_activated_lora_has_the_gradients_of_peft_on_a_layer():
  held = golden('alora/linear')
  key = 'base_model.model.layer.lora_{}.weight'
  x = held['base/input']
  text = np.full(x.shape[:2], 9, np.int32)
  text[0, 1:] = 7, 3  # the last two of the first row
  layer = layer_of('linear', held)[0]
  model, report = peftlab.attach(layer, ALoRA(rank=4, alpha=8, invocation=(7, 3)), where='.*')
  assert report.trainable == 320
  put(model.adapters[0], {s: held['adapter/' + key.format(s.upper())].T for s in 'ab'})
  places = jnp.broadcast_to(jnp.arange(text.shape[1]), text.shape)
  batch = peftlab.Batch(jnp.asarray(text), places)
  parts = peftlab.split(model)

  def total(adapter):
    with peftlab.offering(batch):
      y = peftlab.merge(parts.replace(adapter=adapter))(jnp.asarray(x))
    return (y * held['base/cotangent']).sum(), y

  gradients, y = jax.grad(total, has_aux=True)(parts.adapter)
  close(y, held['output'])
  for slot in 'ab':
    expected = held['grad/' + key.format(slot.upper())].T
    close(_parts.flat(gradients)['adapters', 0, slot], expected, slot)


def test_a_prompt_of_tokens_is_those_tokens():
  model, _ = peftlab.attach(base(), Prompt(count=5, tokens=(5, 7, 9)))
  ids = jnp.broadcast_to(jnp.asarray([5, 7, 9, 5, 7], jnp.int32), (2, 5))
  close(model(tokens()), base()(jnp.concatenate([ids, tokens()], axis=1))[:, 5:])


@functools.cache
def all_together():
  model, _ = peftlab.attach(invoked(), Prompt(count=4, init='normal'), name='prompt')
  return peftlab.attach(model, Prefix(count=2), name='prefix')[0]


def test_packed_texts_are_each_as_alone():
  model, given = all_together(), invocation_tokens()
  segments = jnp.asarray([[1] * 5 + [2] * 7] * 2, jnp.int32)
  places = jnp.asarray([[*range(5), *range(7)]] * 2, jnp.int32)
  packed = jax.jit(lambda: model(given, positions=places, segment_ids=segments))()
  alone = [model(given[:, :5]), model(given[:, 5:])]
  close(packed, np.concatenate(alone, axis=1))


def test_every_applier_gives_the_same():
  model, given = peftlab.merge(peftlab.split(all_together())), invocation_tokens()
  y = model(given)
  model.applier = appliers.Sequential()
  close(model(given), y, 'sequential')
  model.applier = appliers.Pipeline(microbatches=2)
  with jax.set_mesh(jax.make_mesh((2,), ('stage',), devices=jax.devices()[:2])):
    close(jax.jit(lambda: model(given))(), y, 'pipeline')


def test_generation_with_a_cache_is_that_without():
  model = all_together()
  prompts = [[1, 2, 7, 3, 5], [4, 5, 6], [7, 3]]
  made = serve.generate(model, prompts, max_tokens=5)
  run = jax.jit(model.__call__)
  for prompt, new in zip(prompts, made, strict=True):
    # What stands behind a text changes nothing of it, but for a later invocation.
    whole = jnp.asarray([[*prompt, *new, *[0] * (10 - len(prompt) - len(new))]], jnp.int32)
    said = np.argmax(np.asarray(run(whole))[0], axis=-1)
    assert said[len(prompt) - 1 : len(prompt) + 4].tolist() == new


def test_points_without_adapters_cost_nothing():
  bare = peftlab.merge(peftlab.split(base()))
  bare.inputs = bare.layers.attn.keys = bare.layers.attn.values = None

  def text(model):
    segments = jnp.ones(tokens().shape, jnp.int32)

    def run(parts, x):
      return peftlab.merge(parts)(x, segment_ids=segments)

    return jax.jit(run).lower(peftlab.split(model), tokens()).as_text()

  assert text(base()) == text(bare)
  assert text(peftlab.detach(prompted())) == text(bare)
  with peftlab.disabled(prefixed('plain')[0]) as off:
    np.testing.assert_array_equal(off(tokens()), base()(tokens()))


@pytest.mark.parametrize(
  ('adapter', 'where', 'message'),
  (
    (Prompt(), 'all-linear', "Prompt goes on points of the role 'inputs'"),
    (Prompt(), 'attn.q', 'layers.attn.q, a layer with a weight'),
    (LoRA(), 'inputs', "inputs, a point of the role 'inputs'; LoRA goes on layers with a weight"),
    (LoRA(), 'prefix', "a point of the role 'prefix'"),
    (Prefix(), 'inputs', "Prefix goes on points of the role 'prefix'"),
    (ALoRA(), 'attn.q', 'the tokens that invoke it'),
  ),
)
def test_the_wrong_place_is_refused(adapter, where, message):
  with pytest.raises(ValueError, match=message):
    peftlab.attach(base(), adapter, where=where)


def test_a_pattern_for_all_leaves_points_alone():
  _, report = peftlab.attach(base(), LoRA(rank=2), where='.*attn.*')
  assert {row.path.rpartition('.')[2] for row in report.rows} == {'q', 'k', 'v', 'o'}
  both = {'.*': LoRA(rank=2), 'inputs': Prompt(count=2)}
  _, report = peftlab.attach(base(), both)
  assert report.rows[0].path == 'embed'
  assert 'inputs' in [row.path for row in report.rows]


def test_keys_without_values_are_refused():
  model, _ = peftlab.attach(base(), Prefix(count=2), where='keys')
  with pytest.raises(ValueError, match='2 virtual keys and 0 virtual values'):
    model(tokens())


def test_a_model_that_offers_no_tokens_is_refused():
  layer, _ = peftlab.attach(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), ALoRA(rank=2, invocation=(1,)))
  with pytest.raises(ValueError, match='does not offer'):
    layer(jnp.zeros((2, 4)))
  batch = peftlab.Batch(jnp.zeros((1, 3), int), jnp.arange(3)[None])
  with peftlab.offering(batch), pytest.raises(ValueError, match='called with 2 rows'):
    layer(jnp.zeros((2, 4)))


ADAPTERS = {
  'prefix': Prefix(count=3, hidden=4),
  'p_tuning': PTuning(count=3, hidden=4),
  'alora': ALoRA(rank=2, invocation=(3, 4)),
}


@pytest.mark.parametrize('name', ADAPTERS)
def test_it_is_trained_on_packed_rows(name):
  batch = tiny.batch()
  batch['tokens'] = batch['tokens'].at[:, 2:4].set(jnp.asarray([3, 4]))
  batch['segment_ids'] = batch['segment_ids'].at[:, 6:].set(2)
  batch['positions'] = batch['positions'].at[:, 6:].set(jnp.arange(2))
  losses = [m['loss'] for m in tiny.trainee(ADAPTERS[name], learning_rate=0.001).run(*[batch] * 4)]
  assert losses[-1] < losses[0], losses


def test_a_run_trains_a_prompt_and_its_folder_generates(tmp_path):
  made = dataclasses.replace(tiny.experiment(), adapter=Prompt(count=3))
  model = tiny.base_model()
  one = run.Run(made, model, tiny.text(), workdir=tmp_path, say=lambda line: None)
  try:
    loop.train([one], say=lambda line: None)
  finally:
    one.close()
  assert one.status == 'ok'
  peftlab.save_adapter(peftlab.merge(one.parts), tmp_path / 'adapter', name=made.name)
  again = peftlab.load_adapter(model, tmp_path / 'adapter')
  rows = again.inputs.adapters[0].rows[...]
  np.testing.assert_array_equal(rows, one.parts.adapter['inputs']['adapters'][0]['rows'])
  said = serve.generate(again, [[1, 2, 3]], max_tokens=3)
  assert said != serve.generate(model, [[1, 2, 3]], max_tokens=3)

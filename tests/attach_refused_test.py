"""Attach refuses every bad input in one sentence, and changes nothing."""

import dataclasses
import re

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import peftlab
from peftlab import Slot, _attach
from peftlab.plugins.loftq import LoftQ
from peftlab.plugins.lora import LoRA
from tests.attach_test import LORA, Two, once
from tests.testing.broken_plugins import LowRank

pytestmark = pytest.mark.usefixtures('quick_compiles')


def _type(**slots):
  """An adapter whose slots are these; it reads those it knows of LowRank's."""

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Odd(LowRank):
    def slots(self):
      return {k: v for k, v in (super().slots() | slots).items() if v is not None}

  return Odd(rank=2)


def _shifted():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class WrongShape(LowRank):
    def apply(self, x, base, p):
      return super().apply(x, base, p)[..., :3]

  return WrongShape(rank=2)


class OwnAdapters(nnx.Linear):
  adapters = ()


def _with_own_adapters():
  model = nnx.Module()
  model.layer = OwnAdapters(6, 10, rngs=nnx.Rngs(0))
  return model


def _applied(of):
  """An adapter whose `apply` gives what `of` makes of LowRank's output."""

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Other(LowRank):
    def apply(self, x, base, p):
      return of(super().apply(x, base, p))

  return Other(rank=2)


def _slots(of):
  """An adapter whose `slots` gives what `of` makes of LowRank's."""

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Other(LowRank):
    def slots(self):
      return of(super().slots())

  return Other(rank=2)


def _on_an_embedding(of):
  embed = nnx.Embed(4, 6, rngs=nnx.Rngs(0))
  return peftlab.attach(embed, _applied(of), where='.*')[0](jnp.zeros((2,), jnp.int32))


def linear(ins, outs):
  return nnx.Linear(ins, outs, rngs=nnx.Rngs(0))


def _wide(key, shape, dtype):
  del key
  return jnp.zeros((*shape, 1), dtype)


# what -> (call, message)
BAD = {
  'no adapter': (
    lambda: peftlab.attach(Two(), 'lora'),
    "^attach takes an Adapter, given str: 'lora'",
  ),
  'an adapter type': (
    lambda: peftlab.attach(Two(), LoRA),
    '^attach takes an instance, given the type: write LoRA',
  ),
  'no model': (
    lambda: peftlab.attach({}, LORA),
    r'^attach takes a model \(an nnx.Module\), given dict',
  ),
  'parts for a model': (
    lambda: peftlab.attach(peftlab.split(Two()), LORA),
    r'^attach takes a model \(an nnx.Module\), given Parts',
  ),
  'nothing to adapt': (
    lambda: peftlab.attach(nnx.Embed(4, 4, rngs=nnx.Rngs(0)), LORA),
    "^where='all-linear' matches no layer. Layers: Embed.",
  ),
  'nothing for a model': (
    lambda: peftlab.attach(None, LORA),
    r'^attach takes a model \(an nnx.Module\), given NoneType',
  ),
  'no pattern': (lambda: peftlab.attach(Two(), {}), '^attach is given no adapter; expected an'),
  'rngs of two keys': (
    lambda: peftlab.attach(Two(), LORA, rngs=jax.random.split(jax.random.key(0))),
    r'^rngs has keys of shape \(2,\); expected one key\.$',
  ),
  'full of no model': (
    lambda: peftlab.attach(Two(), LORA, full={}),
    r'^full takes a model \(an nnx.Module\), given dict\.$',
  ),
  'full without the layers': (
    lambda: peftlab.attach(Two(), LoftQ(rank=2), full=nnx.Linear(6, 10, rngs=nnx.Rngs(0))),
    r"^full has no layer '\w+'; expected the model as it was before it was quantized\.$",
  ),
  'full of other shapes': (
    lambda: peftlab.attach(linear(6, 10), LoftQ(rank=2), full=linear(6, 4)),
    r'^full has a weight \(6, 4\) at the layer Linear; expected \(6, 10\), as the model has it',
  ),
  'full of other shapes, unused': (
    lambda: peftlab.attach(linear(6, 10), LORA, full=linear(6, 4)),
    r'^full has a weight \(6, 4\) at the layer Linear; expected \(6, 10\), as the model has it',
  ),
  'a norm': (
    lambda: peftlab.attach(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), LORA, where='.*'),
    r'matches no layer that LoRA goes on: LayerNorm is a norm\. Types that go on norms: .*bias',
  ),
  'a layer nobody knows': (
    lambda: peftlab.attach(nnx.ConvTranspose(4, 4, (1,), rngs=nnx.Rngs(0)), LORA, where='.*'),
    'ConvTranspose is of a class, ConvTranspose, that peftlab.register_layer does not know',
  ),
  'an empty name': (lambda: peftlab.attach(Two(), LORA, name=''), "^The adapter name '' must"),
  'a dotted name': (
    lambda: peftlab.attach(Two(), LORA, name='a.b'),
    "^The adapter name 'a.b' must",
  ),
  'a slash': (lambda: peftlab.attach(Two(), LORA, name='a/b'), "^The adapter name 'a/b' must"),
  'no string': (lambda: peftlab.attach(Two(), LORA, name=3), '^The adapter name 3 must be'),
  'a taken name': (
    lambda: peftlab.attach(once(), LORA, name='first'),
    "already has an adapter named 'first'; detach it first",
  ),
  'rngs of a float': (lambda: peftlab.attach(Two(), LORA, rngs=0.5), '^rngs must be a seed, a jax'),
  'rngs of a bool': (lambda: peftlab.attach(Two(), LORA, rngs=True), '^rngs must be a seed, a jax'),
  'rngs of None': (lambda: peftlab.attach(Two(), LORA, rngs=None), '^rngs must be a seed, a jax'),
  'rngs of an old key': (
    lambda: peftlab.attach(Two(), LORA, rngs=jnp.zeros((2,), jnp.uint32)),
    '^rngs must be a seed',
  ),
  'rank 0': (lambda: LoRA(rank=0), r'^LoRA\.rank is 0; it must be at least 1'),
  'rank -1': (lambda: peftlab.attach(Two(), LowRank(rank=-1)), r'^LowRank.rank is -1; it must be'),
  'rank 2.5': (
    lambda: peftlab.attach(Two(), LoRA(rank=2.5)),
    r'^LoRA.rank is 2.5 \(float\); it must be of type int\.$',
  ),
  'rank True': (lambda: LoRA(rank=True), r'^LoRA.rank is True \(bool\); it must be of type int\.$'),
  'rank as text': (
    lambda: LoRA(rank='8'),
    r"^LoRA.rank is '8' \(str\); it must be of type int\.$",
  ),
  'alpha as text': (
    lambda: LoRA(alpha='1'),
    r'^LoRA.alpha is .1. \(str\); it must be of type float',
  ),
  'alpha nan': (
    lambda: peftlab.attach(Two(), LowRank(alpha=float('nan'))),
    r'^LowRank\.alpha is nan; it must be a finite number',
  ),
  'alpha inf in one place': (
    lambda: peftlab.attach(Two(), LORA, fields={'alpha': {'up': float('inf')}}),
    r'^LoRA\.alpha is inf; it must be a finite number .layer up',
  ),
  'rslora 1': (lambda: LoRA(rslora=1), r'^LoRA.rslora is 1 \(int\); it must be of type bool\.$'),
  'where 3': (
    lambda: peftlab.attach(Two(), LORA, where=3),
    '^where takes a pattern or a list of patterns, given 3',
  ),
  'exclude None': (
    lambda: peftlab.attach(Two(), LORA, exclude=None),
    '^exclude takes a pattern or a list of patterns, given None',
  ),
  'seed above 32 bits': (
    lambda: peftlab.attach(Two(), LORA, rngs=2**32),
    r'^The seed 4294967296 must be at least 0 and below 2\*\*32',
  ),
  'seed below 0': (lambda: peftlab.attach(Two(), LORA, rngs=-1), '^The seed -1 must be at least 0'),
  'empty kernel': (
    lambda: peftlab.attach(nnx.Linear(6, 0, rngs=nnx.Rngs(0)), LORA),
    r'^Linear has a kernel \[in 6, out 0\]; an adapter needs at least 1 of each\.$',
  ),
  'dropout 1': (lambda: LoRA(dropout=1.0), '^LoRA dropout is 1.0; it must be at least 0 and below'),
  'init': (lambda: LoRA(init='he_unifrom'), "^No LoRA init 'he_unifrom'"),
  'no slots': (
    lambda: peftlab.attach(Two(), _type(a=None, b=None, scale=None)),
    r'Odd.slots\(\) is empty',
  ),
  'a slot that is none': (
    lambda: peftlab.attach(Two(), _type(a='in rank')),
    'must be a Slot, given str',
  ),
  'a missing slot': (
    lambda: peftlab.attach(Two(), _type(scale=None)),
    "No slot 'scale'. Slots: a, b",
  ),
  'an unread slot': (
    lambda: peftlab.attach(Two(), _type(c=Slot(dims='rank'))),
    'slots that apply never reads: c',
  ),
  'an unknown dimension': (
    lambda: peftlab.attach(Two(), _type(a=Slot(dims='in rnak'))),
    "'rnak' .*did you mean 'rank'",
  ),
  'a slot named items': (
    lambda: peftlab.attach(Two(), _type(items=Slot(dims=''))),
    "cannot name a slot 'items'",
  ),
  'a slot named read': (
    lambda: peftlab.attach(Two(), _type(read=Slot(dims=''))),
    "cannot name a slot 'read'",
  ),
  'a slot named train': (
    lambda: peftlab.attach(Two(), _type(train=Slot(dims=''))),
    "cannot name a slot 'train'",
  ),
  'a slot named active': (
    lambda: peftlab.attach(Two(), _type(active=Slot(dims=''))),
    "cannot name a slot 'active'",
  ),
  'a slot of two words': (
    lambda: peftlab.attach(Two(), _type(**{'a b': Slot(dims='')})),
    "cannot name a slot 'a b'",
  ),
  'init of another shape': (
    lambda: peftlab.attach(Two(), _type(a=Slot(dims='in rank', init=_wide))),
    r"Slot 'a' starts with shape \(\d+, 2, 1\); its dims say \(\d+, 2\)\.",
  ),
  'apply of another shape': (
    lambda: peftlab.attach(Two(), _shifted()),
    r'apply gave shape \(3, 3\)',
  ),
  'slots that are a list': (
    lambda: peftlab.attach(Two(), _slots(list)),
    r'^Other.slots\(\) must be {name: Slot}, given list \(layer \w+\)\.$',
  ),
  'dims of a number': (
    lambda: peftlab.attach(Two(), _type(a=Slot(dims=3))),
    r"^Odd has a slot 'a' with dims=3; expected a word per dimension, .* \(layer \w+\)\.$",
  ),
  'no init': (
    lambda: peftlab.attach(Two(), _type(a=Slot(dims='in rank', init=None))),
    r"^Odd has a slot 'a' with init=None; expected a function init\(key, shape, dtype\)",
  ),
  'init of nothing': (
    lambda: peftlab.attach(Two(), _type(a=Slot(dims='in rank', init=lambda *given: None))),
    r"^Odd \(layer \w+\): Slot 'a' starts as NoneType; expected an array\.$",
  ),
  'a missing slot, whose': (
    lambda: peftlab.attach(Two(), _type(scale=None)),
    r"^Odd \(layer \w+\): No slot 'scale'",
  ),
  'apply of nothing': (
    lambda: peftlab.attach(Two(), _applied(lambda y: None)),
    r'^Other.apply gave NoneType at layer \w+; expected an array of float32, as x is',
  ),
  'apply of two': (
    lambda: peftlab.attach(Two(), _applied(lambda y: (y, y))),
    r'^Other.apply gave tuple at layer',
  ),
  'apply of another dtype': (
    lambda: peftlab.attach(Two(), _applied(lambda y: y.astype(jnp.bfloat16))),
    r'^Other.apply gave an array of bfloat16 at layer \w+; expected an array of float32',
  ),
  'apply of nothing on an embedding': (
    lambda: _on_an_embedding(lambda y: None),
    r'^Other.apply gave NoneType on the layer Embed; expected an array \(2, 6\)\.$',
  ),
  'apply of another shape on an embedding': (
    lambda: _on_an_embedding(lambda y: y[:1]),
    r'^Other.apply gave an array \(1, 6\) on the layer Embed; expected an array \(2, 6\)\.$',
  ),
  'a layer with adapters of its own': (
    lambda: peftlab.attach(_with_own_adapters(), LORA),
    'has an attribute `adapters` of its own',
  ),
  'detach another': (
    lambda: peftlab.detach(once(), 'frist'),
    "no adapter 'frist'; did you mean 'first'",
  ),
  'detach from a base': (lambda: peftlab.detach(Two(), 'a'), "no adapter 'a'. Adapters: none"),
  'activate another': (
    lambda: peftlab.activate(once(), 'first', 'x'),
    "The model has no adapter 'x'. Adapters: first",
  ),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_refused_in_one_sentence(case):
  call, message = BAD[case]
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert str(error.value)[-1] in '.?'


def test_a_failing_attach_leaves_nothing_behind():
  model = once()
  before = peftlab.split(model)
  for adapter, where in (
    (_type(c=Slot(dims='rnak')), 'up'),
    (LORA, 'upp'),
    (_type(c=Slot(dims='')), 'up'),
  ):
    with pytest.raises(ValueError, match=r'rnak|upp|never reads'):
      peftlab.attach(model, adapter, where=where, name='second')
  after = peftlab.split(model)
  assert after.graph == before.graph
  assert _attach.names(model) == ('first',)


def test_a_failing_activate_switches_nothing():
  model, _ = peftlab.attach(once(), LORA, name='second')
  peftlab.activate(model, 'first')
  with pytest.raises(ValueError, match="no adapter 'x'"):
    peftlab.activate(model, 'second', 'x')
  assert [a.active for a in model.up.adapters] == [True, False]


def _broken(y):
  del y
  raise KeyError('gone')


@pytest.mark.parametrize(
  ('call', 'note'),
  (
    (lambda: peftlab.attach(Two(), _applied(_broken)), r'type Other in apply \(layer \w+\)\.'),
    (lambda: peftlab.attach(Two(), _slots(_broken)), r'type Other in slots \(layer \w+\)\.'),
    (
      lambda: peftlab.attach(Two(), _type(a=Slot(dims='in rank', init=lambda *given: _broken(0)))),
      r'type Odd in its first values \(layer \w+\)\.',
    ),
    (lambda: _on_an_embedding(_broken), r"type Other in apply \(Embed, adapter 'default'\)\."),
  ),
)
def test_an_error_in_a_type_of_ones_own_says_where(call, note):
  with pytest.raises(KeyError, match='gone') as error:
    call()
  assert any(re.search(note, line) for line in error.value.__notes__)

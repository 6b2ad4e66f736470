"""The contract: slots, values, what may be registered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import Slot, _adapter, _registry
from peftlab.plugins import adalora, bd_lora, loha, lokr, lora_plus, randlora
from peftlab.plugins.lora import LoRA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide(peftlab.Adapter):
  rank: int = 3
  flag: bool = True
  rate: float = 0.5

  def slots(self):
    return {'a': Slot(dims='in rank')}

  def apply(self, x, base, p):
    return base(x) + 0 * (x @ p.a)


SHAPES = {'': (), 'in': (5,), 'in rank': (5, 3), 'rank out': (3, 7), 'rank rank out': (3, 3, 7)}


@pytest.mark.parametrize('dims', SHAPES)
def test_dims_are_sizes_of_the_kernel_or_fields(dims):
  found = _adapter.slot_shape(Slot(dims=dims), Wide(), sizes={'in': 5, 'out': 7})
  assert found == SHAPES[dims]


BAD_DIMS = {
  'rnak': "'rnak' is neither 'in', 'out', .*, nor a field that holds an int; did you mean 'rank'",
  'flag': '^Wide.flag is True; it must be an int',
  'rate': '^Wide.rate is 0.5; it must be an int',
  'ins': "did you mean 'in'",
}


@pytest.mark.parametrize('word', BAD_DIMS)
def test_other_words_are_refused(word):
  with pytest.raises(ValueError, match=BAD_DIMS[word]):
    _adapter.slot_shape(Slot(dims=f'in {word}'), Wide(), sizes={'in': 5, 'out': 7})


def test_a_size_below_1_is_refused():
  with pytest.raises(ValueError, match=r'^Wide.rank is 0; it must be at least 1.$'):
    _adapter.slot_shape(Slot(dims='in rank'), Wide(rank=0), sizes={'in': 5, 'out': 7})


def test_values_are_read_by_name_and_know_what_was_read():
  p = _adapter.Values({'a': jnp.ones(1), 'b': jnp.ones(2)})
  assert p.a is p['a']
  assert p.read == {'a'}
  assert (list(p), len(p)) == (['a', 'b'], 2)
  with pytest.raises(ValueError, match=r"^No slot 'c'. Slots: a, b.$"):
    _ = p.c


def test_constant_and_zeros_are_inits():
  key = jax.random.key(0)
  np.testing.assert_array_equal(peftlab.constant(2.5)(key, (2,), jnp.float32), [2.5, 2.5])
  assert peftlab.zeros(key, (2, 3), jnp.bfloat16).dtype == jnp.bfloat16


def test_initial_fields_do_not_count_in_comparisons():
  assert LoRA(alpha=1.0) == LoRA(alpha=2.0)
  assert hash(LoRA(alpha=1.0)) == hash(LoRA(alpha=2.0))
  assert LoRA(rank=1) != LoRA(rank=2)


def test_what_is_not_mergeable_says_so():
  with pytest.raises(ValueError, match=r'^Wide cannot be merged into a kernel.$'):
    Wide().fuse(jnp.ones((2, 2)), {})


def test_dropout_above_0_makes_an_adapter_stochastic():
  assert LoRA(dropout=0.1).stochastic
  assert not LoRA().stochastic
  assert not Wide().stochastic


class NoDataclass(peftlab.Adapter):
  rank: int = 8
  slots, apply = Wide.slots, Wide.apply


@dataclasses.dataclass
class NoAdapter:
  rank: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoApply(peftlab.Adapter):
  slots = Wide.slots


BAD_TYPES = {
  'forgotten @dataclass': (NoDataclass, 'must be a frozen dataclass that extends peftlab.Adapter'),
  'no Adapter': (NoAdapter, 'must be a frozen dataclass that extends peftlab.Adapter'),
  'a function': (lambda: None, 'must be a frozen dataclass that extends peftlab.Adapter'),
  'an instance': (Wide(), 'must be a frozen dataclass that extends peftlab.Adapter'),
  'a method is missing': (NoApply, r'lacks apply.$'),
}


@pytest.mark.parametrize('case', BAD_TYPES)
def test_only_a_whole_adapter_type_is_registered(case):
  thing, message = BAD_TYPES[case]
  with pytest.raises(ValueError, match=f"^The adapter 'odd' .*{message}"):
    peftlab.register_adapter('odd')(thing)
  assert 'odd' not in peftlab.adapter_types()


def test_registering_gives_the_class_back(monkeypatch):
  monkeypatch.setattr(_registry.adapters, '_found', dict(_registry.adapters._found))
  assert peftlab.register_adapter('wide_for_test')(Wide) is Wide
  assert 'wide_for_test' in peftlab.adapter_types()
  assert _registry.adapters.name_of(Wide()) == 'wide_for_test'


def test_a_slot_of_no_dtype_is_refused():
  with pytest.raises(ValueError, match="A slot has dtype 'foo'; expected a dtype of numbers"):
    Slot(dims='in', dtype='foo')


def test_a_convolution_has_channels_and_taps():
  kernel = {'in': 12, 'out': 7, 'taps': 4}
  assert _adapter.slot_shape(Slot(dims='channels taps'), Wide(), sizes=kernel) == (3, 4)
  plain = {'in': 12, 'out': 7}
  assert _adapter.slot_shape(Slot(dims='channels taps'), Wide(), sizes=plain) == (12, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Wide):
  """A type whose `sizes` gives what a test says."""

  more: Any = ()

  def sizes(self, kernel):
    return self.more(kernel) if callable(self.more) else self.more


SIZES = {
  'none': (lambda kernel: None, r'^Sized.sizes gave None; expected {word: int}'),
  'a list': ([3], r'^Sized.sizes gave \[3\]; expected {word: int}'),
  'a float': ({'foo': 2.0}, "^Sized.sizes gave 'foo' as 2.0; expected an int"),
  'a bool': ({'foo': True}, "^Sized.sizes gave 'foo' as True; expected an int"),
  'of the kernel': ({'in': 3}, "^Sized.sizes gave the word 'in'; expected words that are no field"),
  'a field': ({'rank': 3}, "^Sized.sizes gave the word 'rank'; expected words that are no field"),
}


@pytest.mark.parametrize('case', SIZES)
def test_wrong_sizes_are_refused(case):
  more, message = SIZES[case]
  with pytest.raises(ValueError, match=message):
    _adapter.slot_shape(Slot(dims='in'), Sized(more=more), sizes={'in': 5, 'out': 7})


def test_sizes_may_be_numbers_of_numpy_and_errors_in_them_name_the_type():
  adapter = Sized(more={'foo': np.int64(3)})
  assert _adapter.slot_shape(Slot(dims='foo'), adapter, sizes={'in': 5, 'out': 7}) == (3,)
  wrong = Sized(more=lambda kernel: {'foo': kernel['rows']})
  with pytest.raises(KeyError) as found:
    _adapter.slot_shape(Slot(dims='foo'), wrong, sizes={'in': 5, 'out': 7})
  assert 'Raised by the adapter type Sized in sizes' in found.value.__notes__[0]
  with pytest.raises(ValueError, match=r"^2, in the dims 'taps/2' of Wide, must divide taps"):
    _adapter.slot_shape(Slot(dims='taps/2'), Wide(), sizes={'in': 6, 'out': 7, 'taps': 3})


BOUNDS = {
  'LoHa.rank': (lambda: loha.LoHa(rank=0), 'at least 1'),
  'LoKr.rank': (lambda: lokr.LoKr(rank=0), 'at least 1'),
  'LoKr.factor': (lambda: lokr.LoKr(factor=-1), 'at least 0'),
  'RandLoRA.rank': (lambda: randlora.RandLoRA(rank=0), 'at least 1'),
  'BDLoRA.blocks': (lambda: bd_lora.BDLoRA(blocks=0), 'at least 1'),
  'AdaLoRA.target': (lambda: adalora.AdaLoRA(target=0), 'at least 1'),
  'AdaLoRA.every': (lambda: adalora.AdaLoRA(every=0), 'at least 1'),
  'AdaLoRA.last': (lambda: adalora.AdaLoRA(last=-1), 'at least 0'),
  'AdaLoRA.beta1': (lambda: adalora.AdaLoRA(beta1=1.5), 'between 0 and 1'),
  'LoRAPlus.ratio': (lambda: lora_plus.LoRAPlus(ratio=-1.0), 'at least 0'),
}


@pytest.mark.parametrize('field', BOUNDS)
def test_fields_are_within_their_bounds(field):
  make, span = BOUNDS[field]
  with pytest.raises(ValueError, match=f'^{field} is .*; it must be {span}'):
    make()


@pytest.mark.parametrize('rate', (-1.0, float('nan'), float('inf'), 'fast'))
def test_a_rate_of_a_slot_is_a_finite_number(rate):
  with pytest.raises(ValueError, match=r'A slot has rate .*; it must be a finite number'):
    Slot(dims='in', rate=rate)


def test_a_claim_is_a_bool():
  kind = dataclasses.dataclass(frozen=True, kw_only=True)(type('Odd', (LoRA,), {'mergeable': 'no'}))
  with pytest.raises(ValueError, match="has mergeable = 'no'; expected a bool"):
    peftlab.register_adapter('claims_wrongly')(kind)

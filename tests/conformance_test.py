"""Every registered adapter type has every property of the suite, with no test of its own."""

import functools

import pytest

import peftlab
from peftlab import _registry, testing

pytestmark = pytest.mark.usefixtures('quick_compiles')

# Put through every mesh, applier and layer type: factors, shared arrays, copies. The others go
# through one of each, and are spared what says nothing about a type; `peftlab check` spares none.
THOROUGH = ('lora', 'vera', 'full')
SPARED = ('a_taken_name_is_refused', 'adding_leaves_the_others')
SPARED += ('detaching_one_leaves_the_others',)
PAIRS = [
  pytest.param(name, claim, id=f'{name}-{claim.name}')
  for name in peftlab.adapter_types()
  for claim in testing.properties()
  if name in THOROUGH or claim.name not in SPARED
]


@functools.cache
def case_of(name):
  return testing.Case(_registry.adapters.get(name), thorough=name in THOROUGH)


@pytest.mark.parametrize(('name', 'claim'), PAIRS)
def test_adapter(name, claim):
  result = testing.check(claim, case_of(name))
  if result.status == 'n.a.':
    pytest.skip(result.reason)
  assert result.status == 'pass', result.reason

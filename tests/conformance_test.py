"""Every registered adapter type has every property of the suite, with no test of its own."""

import functools

import pytest

import peftlab
from peftlab import _registry, testing

pytestmark = pytest.mark.usefixtures('quick_compiles')


@functools.cache
def case_of(name):
  return testing.Case(_registry.adapters.get(name))


@pytest.mark.parametrize('claim', testing.properties(), ids=lambda claim: claim.name)
@pytest.mark.parametrize('name', peftlab.adapter_types())
def test_adapter(name, claim):
  result = testing.check(claim, case_of(name))
  if result.status == 'n.a.':
    pytest.skip(result.reason)
  assert result.status == 'pass', result.reason

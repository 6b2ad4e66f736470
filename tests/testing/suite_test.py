"""The suite: honest adapter types from outside pass all of it, each broken one fails by name."""

import jax
import pytest

from peftlab import testing
from tests.testing import honest_plugins


@pytest.fixture(autouse=True)
def plain_jax(quick_compiles):
  """An author from outside runs JAX as it comes."""
  del quick_compiles
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
    yield


@pytest.mark.parametrize('kind', honest_plugins.HONEST)
def test_an_honest_plugin_passes(kind):
  failed = [r for r in testing.check_adapter(kind) if r.status == 'fail']
  assert not failed, '\n'.join(f'{r.property.name}: {r.reason}' for r in failed)

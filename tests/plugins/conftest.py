"""The setting in which plugins are written: JAX's own promotion of ranks."""

import jax
import pytest


@pytest.fixture(scope='module')
def usual_ranks():
  """Within the module arrays of different ranks are broadcast."""
  with jax.numpy_rank_promotion('allow'):
    yield

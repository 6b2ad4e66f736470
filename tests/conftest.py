"""The setting of every test: 8 CPU devices, strict dtypes and ranks; warnings are errors."""

import jax
import pytest

from peftlab import testing

testing.use_cpu_devices(8)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(scope='module')
def quick_compiles():
  """Programs of this module are compiled with few optimizations: for tests that compile much."""
  with testing.quick_compiles():
    yield

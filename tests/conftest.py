"""The setting of every test: 8 CPU devices, strict dtypes and ranks; warnings are errors."""

import gc
import itertools
import pathlib

import jax
import pytest

from peftlab import testing

testing.use_cpu_devices(8)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

MAPS = pathlib.Path('/proc/self/maps')
MOST_MAPS = 20_000  # a process may have 65,530, and XLA's CPU compiler crashes at the next
_TESTS = itertools.count(1)


@pytest.fixture(scope='module')
def quick_compiles():
  """Programs of this module are compiled with few optimizations: for tests that compile much."""
  with testing.quick_compiles():
    yield


@pytest.fixture(scope='module')
def usual_ranks():
  """Within the module arrays of different ranks are broadcast."""
  with jax.numpy_rank_promotion('allow'):
    yield


def pytest_runtest_teardown():
  """Now and then, lets go of compiled programs: each holds a few of the process's memory maps."""
  if next(_TESTS) % 40 == 0 and MAPS.exists() and MAPS.read_bytes().count(b'\n') > MOST_MAPS:
    jax.clear_caches()
    gc.collect()

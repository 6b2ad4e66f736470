"""The setting of every test: 8 CPU devices, strict dtypes and ranks; warnings are errors."""

import atexit
import gc
import itertools
import os
import pathlib
import shutil
import tempfile

import jax
import pytest

from peftlab import testing

testing.use_cpu_devices(8)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


def share_compiled_programs():
  """The workers of a run, and the commands that tests start, compile each program once."""
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:  # the first process of the run
    folder = tempfile.mkdtemp(prefix='peftlab-compiled-')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {
      'JAX_COMPILATION_CACHE_DIR': folder,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


share_compiled_programs()

MAPS = pathlib.Path('/proc/self/maps')
MOST_MAPS = 20_000  # a process may have 65,530, and XLA's CPU compiler crashes at the next
_TESTS = itertools.count(1)


def pytest_configure(config):
  """Every type is attached by tests of all types, also one that another function starts."""
  config.addinivalue_line('filterwarnings', 'ignore:.* is attached without its own first values')


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

"""Devices and meshes for tests: 8 CPU devices in one process, three shapes of mesh."""

from __future__ import annotations

from collections.abc import Generator
import contextlib

import jax

from peftlab import _specs

SHAPES = ((8, 1), (4, 2), (2, 4))


def use_cpu_devices(count: int = 8) -> None:
  """Makes this process run on CPU devices. To be called before JAX touches a device.

  Raises:
    ValueError: JAX already runs on another number of devices.
  """
  jax.config.update('jax_platforms', 'cpu')
  try:
    jax.config.update('jax_num_cpu_devices', count)
  except RuntimeError as error:
    if jax.device_count() != count:
      raise ValueError(f'JAX already runs on {jax.device_count()} devices, not {count}.') from error
  if jax.device_count() != count:
    raise ValueError(f'There are {jax.device_count()} CPU devices; expected {count}.')


def meshes() -> dict[str, jax.sharding.Mesh]:
  """Meshes of 8 devices by name: fsdp x tensor as (8, 1), (4, 2) and (2, 4)."""
  return {
    f'fsdp{fsdp}_tensor{tensor}': _specs.make_mesh({'fsdp': fsdp, 'tensor': tensor})
    for fsdp, tensor in SHAPES
  }


@contextlib.contextmanager
def quick_compiles() -> Generator[None]:
  """Within the block programs are compiled with few optimizations, in half the time."""
  jax.config.update('jax_disable_most_optimizations', True)
  try:
    yield
  finally:
    jax.config.update('jax_disable_most_optimizations', False)

"""The mesh of a run, and batches on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from typing import Any
import warnings

import jax
from jax.sharding import NamedSharding

from peftlab import _processes, _specs
from peftlab.train.config import Experiment, MeshConfig


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh | None:
  """The mesh of a config on the first of some devices; None for a single device.

  Args:
    config: the sizes.
    devices: default: those there are.

  Raises:
    ValueError: there are too few devices, the rest (-1) is not a whole number, or several processes
      would not all take part.
  """
  all_of_them = devices is None
  sizes, devices = config.sizes, jax.devices() if devices is None else devices
  fixed = math.prod(size for size in sizes.values() if size > 0)
  for name, size in sizes.items():
    if size == -1:
      if len(devices) % fixed:
        raise ValueError(
          f'mesh.{name} is -1, the rest of {len(devices)} devices, which {fixed} does not divide.'
        )
      sizes[name] = len(devices) // fixed
  count = math.prod(sizes.values())
  if all_of_them and _processes.count() > 1 and count < len(devices):
    _refuse_part(sizes, count)
  if count == 1:
    return None
  if count > len(devices):
    shown = ' x '.join(f'{n} {s}' for n, s in sizes.items())
    raise ValueError(f'mesh is {shown}, which needs {count} devices; there are {len(devices)}.')
  return _specs.make_mesh(sizes, devices[:count])


def _refuse_part(sizes: Mapping[str, int], count: int) -> None:
  """Several processes train together on all of their devices, or not at all."""
  shown = ' x '.join(f'{n} {s}' for n, s in sizes.items())
  raise ValueError(
    f'mesh is {shown}, which takes {count} of the {jax.device_count()} devices of '
    f'{_processes.count()} processes; expected all of them, --config.mesh.fsdp=-1 for example.'
  )


def warn_idle(mesh: jax.sharding.Mesh | None, tree: Any, *, applier: str) -> None:
  """Warns of each mesh axis along which devices repeat one another's work.

  Args:
    mesh: of the run.
    tree: its arrays, or shapes that say where they lie.
    applier: a name; under all but the pipeline every device runs all layers, also those that others
      hold.
  """
  if mesh is None or not _processes.is_first():
    return
  specs = [_specs.spec_for(('batch', 'length'), mesh)]
  placed = (getattr(leaf, 'sharding', None) for leaf in jax.tree.leaves(tree))
  specs += [sharding.spec for sharding in placed if isinstance(sharding, NamedSharding)]
  used = {axis for spec in specs for entry in spec for axis in _specs.entry_axes(entry)}
  for axis, size in mesh.shape.items():
    repeat = f"the {size} devices along it repeat one another's work. Expected 1"
    if axis == 'stage' and size > 1 and applier != 'pipeline':
      line = f'base.applier is {applier}, under which {repeat}, or base.applier=pipeline.'
    elif size > 1 and axis not in used:
      line = f'it cuts neither the batch nor any array of the model: {repeat}.'
    else:
      continue
    warnings.warn(f'mesh.{axis} is {size}, but {line}', stacklevel=2)


def place_batch(batch: Mapping[str, Any], mesh: jax.sharding.Mesh | None) -> dict[str, jax.Array]:
  """[rows, length] arrays on the devices, rows over the axes of 'batch'.

  Every process is given all rows and hands its own devices theirs: nothing is sent.
  """
  if mesh is None:
    return {name: jax.device_put(array) for name, array in batch.items()}
  sharding = NamedSharding(mesh, _specs.spec_for(('batch', 'length'), mesh))
  return {name: _processes.put(array, sharding) for name, array in batch.items()}


def check_batch(experiment: Experiment, mesh: jax.sharding.Mesh | None) -> None:
  """Raises ValueError unless the rows of each microbatch divide over the mesh."""
  if mesh is None:
    return
  spec = _specs.spec_for(('batch', 'length'), mesh)
  parts = _specs.shards(spec, mesh) * experiment.train.accumulate
  if experiment.data.batch % parts:
    raise ValueError(
      f'data.batch is {experiment.data.batch}; on a mesh of {dict(mesh.shape)} with '
      f'train.accumulate {experiment.train.accumulate} it must be a multiple of {parts}.'
    )
  base, rows = experiment.base, experiment.data.batch // experiment.train.accumulate
  if base.applier == 'pipeline' and rows % base.microbatches:
    raise ValueError(
      f'base.microbatches is {base.microbatches}; it must divide the {rows} rows that are run at '
      'once (data.batch / train.accumulate).'
    )

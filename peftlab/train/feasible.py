"""What can be told of an experiment before a weight is read: on the shapes of its base."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any
import warnings

from flax import nnx
import jax

from peftlab import _attach, _parts, _processes
from peftlab.models import load, routing
from peftlab.train import devices, page, step
from peftlab.train.config import Experiment
from peftlab.train.opt_state import StepOptions, optimizer, partition
from peftlab.train.text import check_length

_MEMORY = pathlib.Path('/proc/meminfo')
_LIMITS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')


def check(experiment: Experiment) -> nnx.Module:
  """The base as shapes, where the experiment fits it and its devices; see `outlined`."""
  return outlined(experiment).base


@dataclasses.dataclass(frozen=True)
class Outline:
  """What is known of a run before a weight is read.

  Attributes:
    base: the frozen model, as shapes.
    report: the table of what is adapted.
    sizes: bytes of what lies in memory at once in every step, {what: bytes}.
    memory: bytes that there are on the devices, None where that is not known.
  """

  base: nnx.Module
  report: Any
  sizes: dict[str, int]
  memory: int | None


def outlined(experiment: Experiment) -> Outline:
  """An experiment on the shapes of its base: only the headers of files are read.

  Raises:
    ValueError: no such base, too few devices, a pattern that matches no layer, an adapter that
      does not fit them, rows that are too long, a role that no slot has, arrays that no memory
      here holds, or a mesh axis that does not divide an array where that is an error.
  """
  mesh = devices.make_mesh(experiment.mesh)
  devices.check_batch(experiment, mesh)
  base = experiment.base
  options: dict[str, Any] = {'mesh': mesh, 'indivisible': experiment.mesh.indivisible}
  options |= {'applier': base.make_applier(), 'dtype': base.dtype, **base.quantization}
  shapes = load.outline(base.source, **options)
  shapes.lay_out(mesh)
  check_length(experiment, shapes)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # they are told when the adapter is attached
    model, report = _attach.attach(
      shapes,
      experiment.spread(),
      **experiment.targets,
      indivisible=experiment.mesh.indivisible,
      rngs=experiment.seed,
      name=experiment.name,
    )
  factor = experiment.train.load_balancing
  if factor and not any(isinstance(node, routing.Router) for _, node in nnx.iter_graph(shapes)):
    raise ValueError(
      f'train.load_balancing is {factor}, but {base.source} has no router; expected 0.'
    )
  parts, how = _parts.split(model), StepOptions.of(experiment.train)
  step.check_roles(parts, how)
  devices.warn_idle(mesh, parts, applier=base.applier)
  places = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
  needed, there = sizes(parts, how), memory(places)
  check_memory(needed, there)
  return Outline(shapes, report, needed, there)


def sizes(parts: _parts.Parts, options: StepOptions) -> dict[str, int]:
  """Bytes of what lies in memory at once in every step, {what: bytes}; activations left out."""
  trained, _ = partition(parts)
  moments = jax.eval_shape(optimizer(options, 1.0, 0.0).init, trained)
  return {
    'base': _parts.nbytes(parts.base),
    'adapter': _parts.nbytes(parts.adapter),
    'gradient': _parts.nbytes(trained),
    'optimizer': _parts.nbytes(moments),
  }


def check_memory(needed: Mapping[str, int], there: int | None) -> None:
  """Raises ValueError where some arrays together are larger than a memory (None: unknown)."""
  total = sum(needed.values())
  if there is not None and total > there:
    each = ', '.join(f'{name} {page.size(count)}' for name, count in needed.items())
    raise ValueError(
      f'The run needs {page.size(total)} of memory ({each}); there are {page.size(there)}. '
      'Expected a smaller adapter (rank, where), a smaller base (dtype), or more devices (mesh).'
    )


def memory(places: list[jax.Device]) -> int | None:
  """Bytes that some devices have left, together; None where they do not say."""
  own = [device for device in places if device.process_index == jax.process_index()]
  if places[0].platform == 'cpu':
    there = host_memory()
    return there and there * _processes.count()  # as if each had a machine of its own
  stats = [device.memory_stats() or {} for device in own]
  if not all('bytes_limit' in found for found in stats):
    return None
  left = sum(found['bytes_limit'] - found.get('bytes_in_use', 0) for found in stats)
  return left * len(places) // len(own)


def host_memory() -> int | None:
  """Bytes that this process may still take: of the machine, or of its share of it."""
  if not _MEMORY.exists():
    return None
  lines = (line.split() for line in _MEMORY.read_text().splitlines())
  fields = {words[0].rstrip(':'): int(words[1]) * 1024 for words in lines if len(words) > 1}
  found = [fields.get('MemAvailable', 0) + fields.get('SwapFree', 0)]
  for name in _LIMITS:
    path = pathlib.Path(name)
    limit = path.read_text().strip() if path.exists() else 'max'
    if limit.isdigit():
      found.append(int(limit))
  return min(found)

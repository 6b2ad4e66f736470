"""The plan of an experiment on a topology: its step compiled, its memory, its costs, its time."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax

from peftlab import _padded, _parts, _specs
from peftlab.plan import base as plan_base
from peftlab.plan import costs as plan_costs
from peftlab.plan import estimate, hlo, program, topology
from peftlab.plan import shapes as plan_shapes
from peftlab.plan.chips import Chip
from peftlab.train import devices as train_devices
from peftlab.train.config import Experiment
from peftlab.train.opt_state import StepOptions
from peftlab.train.text import check_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What a step of an experiment needs on a topology.

  Attributes:
    topology: its name, and `chip` what one device of it is.
    there: devices that the topology has.
    used: devices that the mesh uses, and `mesh` its axes ({} for a single device).
    experiment: the config.
    trials: in one program; 1 for a run alone.
    held: bytes on one device, by what they are: base, adapter, optimizer, batch.
    memory: by the compiler.
    costs, time: of one step; None where the program did not fit.
    dropped: mesh axes that do not divide a dimension.
    trainable: numbers that are trained.
    compile_seconds: how long compiling took here.
  """

  topology: str
  chip: Chip
  there: int
  used: int
  mesh: dict[str, int]
  experiment: Experiment
  trials: int
  held: dict[str, int]
  memory: program.Memory
  costs: plan_costs.Costs | None
  time: estimate.Time | None
  dropped: tuple[_specs.Dropped, ...]
  trainable: int
  compile_seconds: float

  @property
  def fits(self) -> bool:
    """Whether the compiler found room for all."""
    return self.memory.fits

  @property
  def chips(self) -> int:
    """Chips that are used."""
    return math.ceil(self.used / self.chip.per_chip)

  @property
  def tokens(self) -> int:
    """Tokens of a step, all trials together."""
    data = self.experiment.data
    return data.batch * data.length * self.trials


def plan(
  experiment: Experiment,
  topology_name: str,
  *,
  trials: int = 1,
  packed: Sequence[Experiment] = (),
) -> Plan:
  """Compiles the step of an experiment for a topology, from shapes alone.

  Args:
    experiment: the config; its mesh is one of the topology's devices.
    topology_name: 'v6e:2x4' for example.
    trials: in one program, as `peftlab sweep` packs them.
    packed: the trials of the pack where they differ, in rank for example; the first is
      `experiment`.

  Raises:
    ValueError: no such topology, libtpu is missing, or the experiment does not fit its base or its
      mesh.
  """
  chip, there = topology.devices(topology_name)
  mesh = train_devices.make_mesh(experiment.mesh, there)
  train_devices.check_batch(experiment, mesh)
  base, dropped = base_shapes(experiment, mesh, there[0])
  check_length(experiment, base)
  place = there[0] if mesh is None else mesh
  if trials == 1 and not packed:
    shapes = plan_shapes.shapes(experiment, base, place)
    compiled = program.compile_step(shapes)
  else:
    shapes, variants, lengths = pack_shapes(experiment, packed, base, place)
    compiled = program.compile_pack(shapes, trials, variants=variants, lengths=lengths)
  used = 1 if mesh is None else mesh.size
  found = plan_costs.costs(hlo.parse(compiled.text), used) if compiled.text else None
  return Plan(
    topology=topology_name,
    chip=chip,
    there=len(there),
    used=used,
    mesh={} if mesh is None else {name: n for name, n in mesh.shape.items() if n > 1},
    experiment=experiment,
    trials=trials,
    held=held(shapes, trials),
    memory=compiled.memory,
    costs=found,
    time=None if found is None else estimate.time_of(found, chip),
    dropped=(*dropped, *shapes.dropped),
    trainable=shapes.report.trainable * trials,
    compile_seconds=compiled.seconds,
  )


def base_shapes(
  experiment: Experiment, mesh: jax.sharding.Mesh | None, device: jax.Device
) -> tuple[Any, list[_specs.Dropped]]:
  """The base as shapes on its place, in the order of its applier, and what was dropped."""
  place = device if mesh is None else mesh
  whole, indivisible = plan_base.outline(experiment.base), experiment.mesh.indivisible
  if mesh is not None and indivisible == 'pad':
    whole = _padded.outline(whole, mesh)
  model, dropped = plan_shapes.placed(whole, place)
  quantized = plan_base.quantized(model, experiment.base, indivisible=indivisible)
  if quantized is not model:
    model, dropped = plan_shapes.placed(quantized, place)
  if indivisible == 'error':
    _padded.refuse(dropped)
  decoder: Any = model
  decoder.lay_out(mesh)
  return decoder, dropped


def pack_shapes(
  experiment: Experiment, packed: Sequence[Experiment], base: Any, place: plan_shapes.Place
) -> tuple[plan_shapes.Shapes, tuple[StepOptions, ...], dict[str, int]]:
  """(shapes of the trial that carries a pack, options of its trials, what is padded)."""
  from peftlab.sweep import numbers, packing
  from peftlab.sweep import program as packs

  trials = packed or (experiment,)
  adapters = [trial.adapter for trial in trials]
  carrier = numbers.numbered(packing.carrier(adapters), packing.numbers(adapters))
  whole = plan_shapes.shapes(experiment, base, place, adapter=carrier)
  trees = []
  for adapter in dict.fromkeys(adapters):
    own = plan_shapes.shapes(experiment, base, place, adapter=adapter)
    trees.append(own.parts.adapter)
  variants = tuple(dict.fromkeys(StepOptions.of(trial.train) for trial in trials))
  return whole, variants, packs.padded_lengths(whole.parts, trees)


def held(shapes: plan_shapes.Shapes, trials: int = 1) -> dict[str, int]:
  """Bytes of the arguments on one device, without the padding of the chip's memory."""
  return {
    'base': on_device(shapes.parts.base),
    'adapter': on_device(shapes.parts.adapter) * trials,
    'optimizer': on_device(shapes.state) * trials,
    'batch': on_device(shapes.batch) * trials,
  }


def on_device(tree: Any) -> int:
  """Bytes of some shapes that one device holds."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    if _parts.is_key(leaf):
      total += math.prod(leaf.shape) * 8
      continue
    size = math.prod(leaf.sharding.shard_shape(leaf.shape))
    total += (size * _parts.bits(leaf.dtype) + 7) // 8
  return total

"""An experiment as shapes on a mesh: base, adapter, optimizer state, batch; no array is made."""

from __future__ import annotations

import dataclasses
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from peftlab import _attach, _padded, _parts, _report, _specs
from peftlab.models import routing
from peftlab.train.config import Experiment
from peftlab.train.opt_state import OptState, StepOptions, optimizer, partition, stored_as

Tree = Any
Place = jax.sharding.Mesh | jax.Device

# What `peftlab.data.rows.Rows.batch` gives, all [rows, length].
BATCH = {
  'tokens': jnp.int32,
  'targets': jnp.int32,
  'loss_mask': jnp.float32,
  'positions': jnp.int32,
  'segment_ids': jnp.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """The arguments of a step, each leaf a `jax.ShapeDtypeStruct` with its sharding.

  Attributes:
    parts: of the adapted model in training mode.
    state: of the optimizer.
    batch: of one step.
    options: of the step.
    mesh: None for a single device.
    report: the table of what is adapted.
    dropped: mesh axes that do not divide a dimension of an array.
  """

  parts: _parts.Parts
  state: OptState
  batch: dict[str, Any]
  options: StepOptions
  mesh: jax.sharding.Mesh | None
  report: _report.Report
  dropped: tuple[_specs.Dropped, ...]


def placed(model: nnx.Module, place: Place) -> tuple[nnx.Module, list[_specs.Dropped]]:
  """A model of shapes, each with the sharding that it gets on a mesh or a device."""
  parts = _parts.split(model)
  if isinstance(place, jax.sharding.Mesh):
    where, dropped = _specs.shardings(model, place)
  else:
    where, dropped = {}, []
  whole = {}
  for name in ('adapter', 'base', 'state'):
    leaves = {}
    for path, leaf in _parts.flat(getattr(parts, name)).items():
      sharding: Any = where.get(path, _everywhere(place))
      if path not in where:
        sharding = jax.tree.map(lambda _, s=sharding: s, leaf)
      leaves[path] = jax.tree.map(_with, leaf, sharding)
    whole[name] = _parts.nest(leaves)
  return _parts.merge(parts.replace(**whole)), dropped


def _with(shape: Any, sharding: Any) -> Any:
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _everywhere(place: Place) -> Any:
  if isinstance(place, jax.sharding.Mesh):
    return NamedSharding(place, PartitionSpec())
  return SingleDeviceSharding(place)


def shapes(
  experiment: Experiment, base: nnx.Module, place: Place, *, adapter: Any = None
) -> Shapes:
  """The arguments of the step of an experiment.

  Args:
    experiment: the config.
    base: the frozen model as shapes that are on the place.
    place: a mesh, or a single device.
    adapter: in the place of the experiment's.

  Raises:
    ValueError: the adapter does not fit the base.
  """
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # a run says them when it attaches
    model, report = _attach.attach(
      base,
      experiment.spread(adapter),
      **experiment.targets,
      indivisible=experiment.mesh.indivisible,
      rngs=experiment.seed,
      name=experiment.name,
    )
  model = routing.record_routing(model) if experiment.train.load_balancing else model
  model.train()
  parts, options = _parts.split(model), StepOptions.of(experiment.train)
  mesh = place if isinstance(place, jax.sharding.Mesh) else None
  return Shapes(
    parts=parts,
    state=state_shapes(parts, options),
    batch=batch_shapes(experiment, place),
    options=options,
    mesh=mesh,
    report=report,
    dropped=tuple(report.dropped),
  )


def batch_shapes(experiment: Experiment, place: Place) -> dict[str, Any]:
  """Of one batch, its rows split as `devices.place_batch` splits them."""
  shape = (experiment.data.batch, experiment.data.length)
  where = _everywhere(place)
  if isinstance(place, jax.sharding.Mesh):
    where = NamedSharding(place, _specs.spec_for(('batch', 'length'), place))
  return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for name, dtype in BATCH.items()}


def state_shapes(parts: _parts.Parts, options: StepOptions) -> OptState:
  """What `init_opt_state` makes, as shapes that lie where its arrays would.

  A moment lies as the trainable array at the end of its path does; a number lies everywhere.

  Raises:
    ValueError: the adapter has no trainable array.
  """
  trained = _parts.flat(partition(parts)[0])
  if not trained:
    raise ValueError('The adapter has no trainable array, so there is nothing to train.')
  beside = _beside(next(iter(trained.values())).sharding)

  def number(dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct((), dtype, sharding=beside)

  def moment(path: tuple, leaf: Any) -> Any:
    keys = tuple(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', None))) for k in path)
    same = [a for p, a in trained.items() if keys[-len(p) :] == p and a.shape == leaf.shape]
    return _with(leaf, same[0].sharding if same and leaf.ndim else beside)

  tree = _parts.nest(trained)
  made = jax.eval_shape(optimizer(options, 1.0, 0.0).init, _padded.cut_tree(tree))
  return OptState(
    inner=stored_as(jax.tree_util.tree_map_with_path(moment, made), tree),
    state=parts.state,
    step=number(jnp.int32),
    skipped=number(jnp.int32),
    average=number(),
    learning_rate=number(),
    weight_decay=number(),
  )


def _beside(sharding: Any) -> Any:
  if isinstance(sharding, NamedSharding):
    return NamedSharding(sharding.mesh, PartitionSpec())
  return sharding

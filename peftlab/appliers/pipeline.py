"""The pipeline applier: layers lie over the mesh axis 'stage', microbatches pass through them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from flax import nnx
import jax

from peftlab import _parts, _registry, _stack
from peftlab.appliers import applier, layout, microbatches, one_layer, outside, remat, staged
from peftlab.appliers import schedule as schedules


@_registry.appliers.register('pipeline')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline(applier.Applier):
  """Each device along the mesh axis 'stage' holds some layers, and microbatches move past them.

  Needs a mesh with an axis 'stage' in context (`jax.set_mesh`); its other axes shard as they always
  do. The base never moves: `lay_out` puts it in the order of the schedule, once, and `apply` takes
  it in no other. A layer's state (counters, rng) sees the microbatches one after the other, as if
  scan were called on each.

  Attributes:
    microbatches: into how many parts the rows of x are cut.
    repeats: how often a microbatch goes around the stages: 1 is plain (GPipe, arXiv:1811.06965),
      more is circular (arXiv:2104.04473, section 2.2), with a smaller bubble.
    staged: how many layers are in the stages; 0: as many as they divide (with rest='pad' all).
    rest: what becomes of the others: 'first' or 'last' (they run outside of the stages, before or
      after them), 'pad' (stages are filled up with places that do nothing), or an 'error'.
    whole: which arguments of the context every microbatch gets whole, though they do not look it:
      see `microbatches.sort_context`.
    remat: what the backward pass recomputes in each layer: a word of `remat.POLICIES`, or none.
  """

  microbatches: int = 1
  repeats: int = 1
  staged: int = 0
  rest: str = 'error'
  whole: tuple[int, ...] = ()
  remat: str = 'none'

  def __post_init__(self):
    remat.check(self.remat)
    for name, least in (('microbatches', 1), ('repeats', 1), ('staged', 0)):
      if getattr(self, name) < least:
        raise ValueError(f'Pipeline({name}={getattr(self, name)}): it must be at least {least}.')
    if self.rest not in schedules.RESTS:
      near = _registry.did_you_mean(self.rest, schedules.RESTS)
      raise ValueError(
        f'Pipeline(rest={self.rest!r}){near or "."} Words: {", ".join(schedules.RESTS)}.'
      )

  def apply(
    self, layers: _parts.Parts, x: Any, body: applier.Body, *context: Any
  ) -> tuple[Any, applier.Created]:
    """See `Applier.apply`; the stack must be laid out, see `lay_out`.

    Raises:
      ValueError: there is no axis 'stage'; the stages do not divide the layers and `rest` does not
        say what to do; the stack is not laid out for them; the microbatches do not divide the rows.
    """
    stacked = _stack.stacked(layers, self.axis)
    if stacked.length == 0:
      return x, applier.nothing_created(layers)
    plan = self.schedule(stacked.length, jax.sharding.get_abstract_mesh())
    if stacked.order != plan.order:
      raise ValueError(
        f'The stack is not laid out for {plan}; call Pipeline.lay_out once, before it is attached '
        'to or trained.'
      )
    sorted_context = microbatches.sort_context(
      context, microbatches.batch_size(x, plan.microbatches), self.whole
    )
    leaves = {name: _parts.flat(getattr(layers, name)) for name in one_layer.NAMES}
    layer = one_layer.Layer(layers, stacked, body, context, self.remat, in_loop=True)
    alone: list[one_layer.Leaves] = []
    if plan.before:
      x, alone = outside.run_outside(layer, plan, leaves, x)
    inner = dataclasses.replace(layer) if plan.depth else layer
    new = None
    if plan.depth:
      x, new = staged.run_stages(inner, plan, leaves, x, sorted_context)
    if plan.after:
      x, alone = outside.run_outside(layer, plan, leaves, x)
    return x, inner.created(outside.put_back(new, alone, plan))

  def schedule(self, layers: int, mesh: Any) -> schedules.Schedule:
    """The schedule of so many layers on a mesh, concrete or abstract.

    Raises:
      ValueError: the mesh has no axis 'stage', or it does not fit (see `schedule.schedule`).
    """
    if staged.AXIS not in mesh.shape:
      shown = dict(mesh.shape) or 'no mesh'
      raise ValueError(
        f"Pipeline needs a mesh with an axis '{staged.AXIS}' in context (jax.set_mesh); there is "
        f'{shown}.'
      )
    if staged.AXIS in getattr(mesh, 'manual_axes', ()):
      raise ValueError('A pipeline cannot run inside a layer of another pipeline.')
    return schedules.schedule(
      layers,
      stages=mesh.shape[staged.AXIS],
      repeats=self.repeats,
      microbatches=self.microbatches,
      staged=self.staged,
      rest=self.rest,
    )

  def lay_out(self, layers: nnx.Module, mesh: Any = None, *, donate: bool = False) -> nnx.Module:
    """See `Applier.lay_out`."""
    order = self.plan(layers, mesh).order
    return layout.reorder(layers, order, axis=self.axis, donate=donate)

  def plan(self, layers: nnx.Module, mesh: Any = None) -> schedules.Schedule:
    """The schedule of a stack on a mesh (default: the one in context); `str` of it tells a person.

    Raises:
      ValueError: see `schedule`.
    """
    found = _stack.stacked(_parts.split(layers), self.axis)
    return self.schedule(found.length, mesh or jax.sharding.get_abstract_mesh())

  def for_batch(self, rows: int) -> Pipeline:
    """See `Applier.for_batch`: with as many microbatches as divide `rows` and `microbatches`."""
    return dataclasses.replace(self, microbatches=math.gcd(self.microbatches, rows))

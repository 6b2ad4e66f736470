"""The stages of a pipeline: each device of the axis 'stage' runs its own layers, tick by tick."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from peftlab.appliers import microbatches, one_layer, remat
from peftlab.appliers.schedule import Schedule

AXIS = 'stage'
Leaves = one_layer.Leaves
NAMES = one_layer.NAMES


def run_stages(
  layer: one_layer.Layer, plan: Schedule, leaves: Leaves, x: Any, context: microbatches.Context
) -> tuple[Any, Leaves]:
  """The staged layers of a stack, on microbatches.

  Args:
    layer: one layer as a function; its policy is the remat policy.
    plan: the schedule.
    leaves: arrays of the stack, in the order of the schedule.
    x: the carry, whole.
    context: sorted.

  Returns:
    x after the staged layers, and {name: {path: array [places, ...]}}: the state after them and
    what they created.
  """
  batch = microbatches.batch_size(x, plan.microbatches)
  rows = microbatches.state_rows(layer.layers, layer.stacked, batch)
  axes: Any = layer.stacked.axes
  shared = {n: {p: a for p, a in leaves[n].items() if axes[n][p] is None} for n in NAMES}
  own = {n: {p: a for p, a in leaves[n].items() if axes[n][p] is not None} for n in NAMES}
  own = {
    n: {p: jax.tree.map(lambda a, n=n, p=p: _by_stage(a, axes[n][p]), v) for p, v in own[n].items()}
    for n in NAMES
  }
  specs = {n: {p: P(*(None,) * axes[n][p], AXIS) for p in own[n]} for n in NAMES}

  def cut(array: Any) -> Any:
    return microbatches.split(array, plan.microbatches) if batch else array[None]

  def whole(array: Any) -> Any:
    return on_stages(jnp.asarray(array), plan.stages)

  everywhere = (
    jax.tree.map(lambda a: whole(cut(jnp.asarray(a))), x),
    jax.tree.map(whole, shared),
    {i: whole(cut(a) if i in context.rows else a) for i, a in _arrays(context).items()},
  )
  numbers = _by_stage(jnp.asarray(plan.order, jnp.int32), 0)

  def run(own: Leaves, everywhere: tuple, numbers: jax.Array) -> tuple[Any, Leaves]:
    x, shared, given = jax.tree.map(lambda a: a[0], everywhere)
    stage = Stage(layer, plan, own, shared, given, context, numbers, rows, batch)
    return stage.run(x)

  y, new = jax.jit(
    jax.shard_map(
      run,
      in_specs=(specs, P(AXIS), P(AXIS)),
      out_specs=P(AXIS),
      axis_names={AXIS},
      check_vma=False,  # bodies may carry what they like through loops of their own
    )
  )(own, everywhere, numbers)
  y = jax.tree.map(_only_one, y)
  y = jax.tree.map(microbatches.join if batch else _first, y)
  return jax.tree.map(_laid_as, y, x), new


def _arrays(context: microbatches.Context) -> dict[int, Any]:
  return context.rows | context.whole


def on_stages(array: jax.Array, stages: int) -> jax.Array:
  """One copy for each stage along a new first dimension: no device holds more than its own."""
  mesh = jax.sharding.get_abstract_mesh()
  copies = jnp.broadcast_to(array[None], (stages, *array.shape))
  if mesh.explicit_axes:
    return jax.reshard(copies, P(AXIS, *jax.typeof(array).sharding.spec))
  rest = (P.UNCONSTRAINED,) * array.ndim
  return lax.with_sharding_constraint(copies, P(AXIS, *rest))


def _by_stage(array: jax.Array, axis: int) -> jax.Array:
  """An array whose layer axis lies over the stages; in Auto mode the `shard_map` sees to it."""
  if AXIS not in jax.sharding.get_abstract_mesh().explicit_axes:
    return array
  spec = list(jax.typeof(array).sharding.spec)
  spec[axis] = AXIS
  return jax.reshard(array, P(*spec))


def _laid_as(array: jax.Array, like: Any) -> jax.Array:
  """An array over the explicit axes that another of its shape lies over."""
  if not jax.sharding.get_abstract_mesh().explicit_axes:
    return array
  return jax.reshard(array, jax.typeof(like).sharding.spec)


def _only_one(array: jax.Array) -> jax.Array:
  """The sum over stages, of which all but one give 0: exact, in any dtype."""
  if jnp.issubdtype(array.dtype, jnp.inexact):
    return lax.reduce(array, np.zeros((), array.dtype), lax.add, (0,))
  return jnp.sum(array, axis=0, dtype=array.dtype)


def _first(array: jax.Array) -> jax.Array:
  return array[0]


@dataclasses.dataclass
class Stage:
  """One stage, inside the `shard_map`.

  Attributes:
    layer, plan: see `run_stages`.
    own: arrays of this stage, its places along their layer axes.
    shared: arrays without a layer axis.
    given: arrays of the context, those of `context.rows` as [microbatches, ...].
    context: how they make a context.
    numbers: [places] the number of the layer at each place, or NO_LAYER.
    rows: {path of a state array with rows: their axis}.
    batch: the rows of x; 0: there is one microbatch.
  """

  layer: one_layer.Layer
  plan: Schedule
  own: Leaves
  shared: Leaves
  given: dict[int, Any]
  context: microbatches.Context
  numbers: jax.Array
  rows: dict[tuple, int]
  batch: int

  def run(self, x: Any) -> tuple[Any, Leaves]:
    """x [microbatches, ...] -> it after the staged layers, on stage 0, and what is new here."""
    plan = self.plan
    stage = lax.axis_index(AXIS)
    adapter = {p: self._front('adapter', p, a) for p, a in self.own['adapter'].items()}
    state = {p: self._rows(p, self._front('state', p, a)) for p, a in self.own['state'].items()}
    moving = jax.tree.map(_first, x)  # what moves while there is no work must be finite too
    state, fixed, fresh = self._empty(adapter, state, moving)
    ring = [(i, (i + 1) % plan.stages) for i in range(plan.stages)]

    def tick(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
      moving, waiting, state, fresh = carry
      waiting = self._received(waiting, moving, t)
      repeat, microbatch, busy = plan.work(stage, t)
      here = jax.tree.map(
        lambda w, m: jnp.where(stage == 0, _at(w, microbatch), m), waiting, moving
      )
      index = (repeat * plan.depth, microbatch)
      y, state, made = self._depth(adapter, state | fixed, here, index, busy, state.keys())
      fresh = self._keep(fresh, made, index, busy)
      y = jax.tree.map(lambda a: lax.ppermute(a, AXIS, ring), y)
      return (y, waiting, state, fresh), None

    carry = (moving, x, state, fresh)
    (moving, x, state, fresh), _ = lax.scan(tick, carry, jnp.arange(plan.ticks))
    x = self._received(x, moving, plan.ticks)
    x = jax.tree.map(lambda a: jnp.where(stage == 0, a, jnp.zeros_like(a))[None], x)
    return x, self._out(state, fresh)

  def _front(self, name: str, path: tuple, value: Any) -> Any:
    axis: Any = self.layer.stacked.axes[name][path]
    return jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), value)

  def _rows(self, path: tuple, value: Any) -> Any:
    """[places, ...] -> [places, microbatches, ...] where the state has rows."""
    if path not in self.rows:
      return value
    axis = self.rows[path] + 1
    cut = microbatches.split(value, self.plan.microbatches, axis)
    return jnp.moveaxis(cut, 0, 1)

  def _received(self, waiting: Any, moving: Any, t: Any) -> Any:
    """What waits for stage 0, with what the last stage computed a tick ago in its place."""
    _, microbatch, busy = self.plan.work(self.plan.stages, t)
    return jax.tree.map(
      lambda w, m: lax.dynamic_update_index_in_dim(
        w, jnp.where(busy, m, _at(w, microbatch)), microbatch, 0
      ),
      waiting,
      moving,
    )

  def _one(
    self, base: dict[str, Any], arrays: Leaves, x: Any, index: Any, given: dict[int, Any]
  ) -> tuple:
    """One layer. It reads its base itself, so that the backward pass can read it again."""
    axes = self.layer.stacked.axes['base']
    read = {
      path: jax.tree.map(
        lambda a, axis=axes[path]: lax.dynamic_index_in_dim(a, index, axis, keepdims=False), value
      )
      for path, value in base['own'].items()
    }
    leaves = {n: arrays[n] | base['shared'][n] for n in NAMES}
    leaves['base'] |= read
    self.layer.context = self.context.build(given)
    return self.layer.run(leaves, x)

  @property
  def _base(self) -> dict[str, Any]:
    return {'own': self.own['base'], 'shared': self.shared}

  def _given(self, microbatch: Any) -> dict[int, Any]:
    return {i: _at(a, microbatch) if i in self.context.rows else a for i, a in self.given.items()}

  def _depth(
    self, adapter: dict, state: dict, x: Any, index: tuple, busy: jax.Array, carried: Any
  ) -> tuple[Any, dict, Leaves]:
    """The layers of one repeat, on one microbatch: (x, the whole state after them, what is new)."""
    start, microbatch = index
    given = self._given(microbatch)
    run = remat.wrap_reading(self._one, self.layer.policy)
    here = {p: self._read(p, a, index) for p, a in state.items()}

    def step(x: Any, xs: tuple) -> tuple[Any, Leaves]:
      i, adapter, before = xs
      arrays = {'adapter': adapter, 'base': {}, 'state': before}
      y, new = run(self._base, arrays, x, start + i, given)
      runs = self.numbers[start + i] >= 0
      y = _where(runs, y, x) if self.plan.padding else y
      after = {p: _where(runs & busy, new['state'].pop(p), before[p]) for p in carried}
      return y, new | {'after': after}

    slices = {p: _slices(a, start, self.plan.depth) for p, a in adapter.items()}
    x, new = lax.scan(step, x, (jnp.arange(self.plan.depth), slices, here))
    after = new.pop('after')
    state = {p: self._write(p, state[p], after[p], index) for p in carried}
    return x, state, new

  def _read(self, path: tuple, value: Any, index: tuple) -> Any:
    start, microbatch = index
    here = _slices(value, start, self.plan.depth)
    return _at(here, microbatch, 1) if path in self.rows else here

  def _write(self, path: tuple, value: Any, new: Any, index: tuple) -> Any:
    start, microbatch = index
    if path not in self.rows:
      return jax.tree.map(lambda a, b: lax.dynamic_update_slice_in_dim(a, b, start, 0), value, new)
    zero = jnp.zeros((), start.dtype)
    at = (start, microbatch, *(zero,) * (value.ndim - 2))
    return lax.dynamic_update_slice(value, new[:, None], at)

  def _empty(self, adapter: dict, state: dict, x: Any) -> tuple[dict, dict, Leaves]:
    """(state that is carried, state that each microbatch finds anew, room for what is created)."""
    zero = jnp.zeros((), jnp.int32)
    arrays = {
      'adapter': {p: jax.tree.map(_first, a) for p, a in adapter.items()},
      'base': {},
      'state': {p: jax.tree.map(_first, self._read(p, a, (zero, zero))) for p, a in state.items()},
    }
    _, new = jax.eval_shape(self._one, self._base, arrays, x, zero, self._given(zero))
    carried = {
      p for p, a in arrays['state'].items() if _outline(a) == _outline(new['state'].get(p))
    }
    places = self.plan.held

    def room(*sizes: int):
      return lambda a: lax.full((*sizes, *a.shape), 0, a.dtype)

    fresh = {n: jax.tree.map(room(places), new[n]) for n in ('adapter', 'base')}
    made = {p: a for p, a in new['state'].items() if p not in carried}
    fresh['state'] = jax.tree.map(room(places, self.plan.microbatches), made)
    kept = {p: a for p, a in state.items() if p in carried}
    return kept, {p: a for p, a in state.items() if p not in carried}, fresh

  def _keep(self, fresh: Leaves, made: Leaves, index: tuple, busy: jax.Array) -> Leaves:
    """Arrays come from the first microbatch, state from each."""
    start, microbatch = index
    kept: Leaves = {}
    for name in NAMES:
      wanted = busy if name == 'state' else busy & (microbatch == 0)

      def put(old: jax.Array, new: jax.Array, wanted: Any = wanted, name: str = name) -> jax.Array:
        new = new[:, None] if name == 'state' else new
        at = [start, microbatch] if name == 'state' else [start]
        at += [jnp.zeros((), start.dtype)] * (old.ndim - len(at))
        found = lax.dynamic_slice(old, at, new.shape)
        return lax.dynamic_update_slice(old, jnp.where(wanted, new, found), at)

      kept[name] = jax.tree.map(put, fresh[name], made[name])
    return kept

  def _out(self, state: dict, fresh: Leaves) -> Leaves:
    after = {}
    for path, value in state.items():
      if path in self.rows:
        value = microbatches.join(jnp.moveaxis(value, 1, 0), self.rows[path] + 1)
      after[path] = value
    for path, value in fresh['state'].items():
      after[path] = jax.tree.map(
        lambda a, path=path: microbatches.merged(a, self.batch, path), value
      )
    return {'adapter': fresh['adapter'], 'base': fresh['base'], 'state': after}


def _at(tree: Any, index: Any, axis: int = 0) -> Any:
  return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, axis, keepdims=False), tree)


def _slices(tree: Any, start: Any, size: int) -> Any:
  return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), tree)


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _outline(value: Any) -> Any:
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), value)

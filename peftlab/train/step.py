"""One update: gradients for the adapter's trainable arrays alone, the base only read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from einops import rearrange
from flax import nnx
import jax
import jax.numpy as jnp
import optax

from peftlab import _layer, _padded, _parts
from peftlab._adapter import Slot
from peftlab.models import routing
from peftlab.train import fields, hooks, loss, optimizers
from peftlab.train.opt_state import OptState, StepOptions, combine, optimizer, partition

Tree = Any
Metrics = dict[str, jax.Array]


class Step:
  """A compiled update: `step(adapter, opt_state, base, batch) -> (adapter, opt_state, metrics)`.

  The first two arguments are donated and come back with the shardings they had; the base is read
  and never returned.

  Attributes:
    traces: how often it was traced: 1, however many adapters of one type and rank it trains.
  """

  def __init__(self, graph: nnx.GraphDef, options: StepOptions, shardings: tuple[Tree, Tree]):
    self.traces = 0
    self._graph, self._options = graph, options
    self._jitted = jax.jit(self._update, donate_argnums=(0, 1), out_shardings=(*shardings, None))

  def __call__(
    self, adapter: Tree, opt_state: OptState, base: Tree, batch: loss.Batch
  ) -> tuple[Tree, OptState, Metrics]:
    """One update; metrics are scalars: loss, grad_norm, tokens, learning_rate, skipped.

    With `load_balancing` there is one more, that loss; the loss holds it times its factor.
    """
    return self._jitted(adapter, opt_state, base, batch)

  def lower(self, *arguments: Any) -> Any:
    """The step lowered for some arguments, or for their shapes."""
    return self._jitted.lower(*arguments)

  def _update(
    self, adapter: Tree, opt_state: OptState, base: Tree, batch: loss.Batch
  ) -> tuple[Tree, OptState, Metrics]:
    self.traces += 1
    # The optimizer and its hooks see arrays without padding, which is put back behind them.
    cut, state = _padded.cut_tree((adapter, opt_state))
    new, changed, metrics = update(self._graph, self._options, cut, state, base, batch)
    return *_padded.pad_tree((new, changed), (adapter, opt_state)), metrics


def step_for(parts: _parts.Parts, opt_state: OptState, options: StepOptions) -> Step:
  """The step for some parts; the same one for every adapter of their type, rank and placement.

  Raises:
    ValueError: `role_rates` has a role that no trainable slot has.
  """
  check_roles(parts, options)
  where = jax.tree.map(lambda a: a.sharding, (parts.adapter, opt_state))
  leaves, tree = jax.tree.flatten(where)
  return _step(parts.graph, options, tuple(leaves), tree)


@functools.lru_cache(maxsize=64)
def _step(graph: nnx.GraphDef, options: StepOptions, leaves: tuple, tree: Any) -> Step:
  return Step(graph, options, jax.tree.unflatten(tree, leaves))


def update(
  graph: nnx.GraphDef,
  options: StepOptions,
  adapter: Tree,
  opt_state: OptState,
  base: Tree,
  batch: loss.Batch,
) -> tuple[Tree, OptState, Metrics]:
  """The update that a `Step` compiles, a pure function: what a sweep maps over trials.

  An update whose loss or gradient is not finite, or whose loss is a spike, leaves adapter and
  moments as they were; it still counts as a step. So does one that would make the adapter not
  finite; its loss is given as NaN, for the run has diverged.
  """
  parts = _parts.Parts(graph, adapter, base, opt_state.state)
  found = gradients(parts, batch, options.accumulate, options.load_balancing)
  return finish(options, parts, opt_state, found, batch)


# (mean loss, its gradient for the trainable arrays, the state after)
Gradients = tuple[jax.Array, Tree, Tree]


def gradients(
  parts: _parts.Parts, batch: loss.Batch, accumulate: int = 1, load_balancing: float = 0.0
) -> Gradients:
  """The first half of an update: what does not depend on the optimizer."""
  parts = routing.forget(parts) if load_balancing else parts
  trained, frozen = partition(parts)
  return _gradients(parts, trained, frozen, batch, accumulate, load_balancing)


def finish(
  options: StepOptions,
  parts: _parts.Parts,
  opt_state: OptState,
  found: Gradients,
  batch: loss.Batch,
) -> tuple[Tree, OptState, Metrics]:
  """The second half of an update: from the gradients to the new arrays."""
  trained, frozen = partition(parts)
  value, grads, state = found
  norm = optax.tree.norm(grads)
  rate, new, inner = _optimize(options, parts, trained, grads, opt_state)
  ok = jnp.isfinite(value) & jnp.isfinite(norm) & ~_spike(value, opt_state, options)
  # New arrays beyond all numbers are not kept, and end the run as a loss of NaN does.
  lost = ok & ~jnp.isfinite(optax.tree.norm(new))
  ok, value = ok & ~lost, jnp.where(lost, jnp.nan, value)
  changed = dataclasses.replace(
    opt_state,
    inner=_where(ok, inner, opt_state.inner),
    state=state,
    step=opt_state.step + 1,
    skipped=opt_state.skipped + (~ok).astype(jnp.int32),
    average=jnp.where(ok, _running_mean(opt_state.average, value), opt_state.average),
  )
  metrics = {
    'loss': value,
    'grad_norm': norm,
    'tokens': loss.count_tokens(batch).astype(jnp.int32),
    'learning_rate': rate,
    'skipped': (~ok).astype(jnp.int32),
  }
  if options.load_balancing:
    routed = _parts.merge(parts.replace(state=state))
    metrics['load_balancing'] = routing.load_balancing_loss(routed)
  after = parts.replace(adapter=combine(_where(ok, new, trained), frozen))
  more = hooks.after_step(after, grads, step=opt_state.step, steps=options.steps)
  if not more:
    return after.adapter, changed, metrics
  old = _parts.flat(after.adapter)
  kept = {path: jnp.where(ok, array, old[path]) for path, array in more.items()}
  return _parts.nest(old | kept), changed, metrics


def _where(ok: jax.Array, new: Tree, old: Tree) -> Tree:
  return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def _optimize(
  options: StepOptions, parts: _parts.Parts, trained: Tree, grads: Tree, opt_state: OptState
) -> tuple[jax.Array, Tree, Tree]:
  """(learning rate of this step, new trainable arrays, new inner state)."""
  schedule = optimizers.schedules.get(options.schedule)(options.steps, options.warmup_steps)
  with jax.numpy_dtype_promotion('standard'):  # optax mixes int32 counts with floats
    rate = opt_state.learning_rate * jnp.asarray(schedule(opt_state.step), jnp.float32)
    found = optimizer(options, rate, opt_state.weight_decay)
    updates, inner = found.update(grads, opt_state.inner, trained)
    updates = _scale_roles(parts, updates, options)
    return rate, optax.apply_updates(trained, updates), inner


def _gradients(
  parts: _parts.Parts,
  trained: Tree,
  frozen: Tree,
  batch: loss.Batch,
  accumulate: int,
  load_balancing: float,
) -> Gradients:
  """(mean loss over the tokens that count, its gradient, the state after), over microbatches."""
  count = jnp.maximum(loss.count_tokens(batch), 1.0)

  def mean_loss(trained: Tree, state: Tree, rows: loss.Batch) -> tuple[jax.Array, Tree]:
    model = parts.replace(adapter=combine(trained, frozen), state=state)
    total, after = loss.summed_loss(model, rows)
    extra = hooks.penalty(_parts.merge(model))
    value = total / count + (0.0 if extra is None else extra / accumulate)
    if load_balancing:
      routed = _parts.merge(model.replace(state=after))
      balance = routing.load_balancing_loss(routed, since=_parts.merge(model))
      value = value + load_balancing * balance / accumulate
    return value, after

  gradient = jax.value_and_grad(mean_loss, has_aux=True)
  if accumulate == 1:
    (value, state), grads = gradient(trained, parts.state, batch)
    return value, grads, state

  def add(carry: tuple, rows: loss.Batch) -> tuple[tuple, None]:
    value, grads, state = carry
    (more, state), new = gradient(trained, state, rows)
    return (value + more, jax.tree.map(jnp.add, grads, new), state), None

  # Row i goes to microbatch i % n, so that the rows of a device stay on it.
  rows = {k: rearrange(a, '(b n) ... -> n b ...', n=accumulate) for k, a in batch.items()}
  start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained), parts.state)
  (value, grads, state), _ = jax.lax.scan(add, start, rows)
  return value, grads, state


def _spike(value: jax.Array, opt_state: OptState, options: StepOptions) -> jax.Array:
  if not options.spike_skip:
    return jnp.zeros((), bool)
  return value > options.spike_skip * opt_state.average  # False while the average is NaN


def _running_mean(average: jax.Array, value: jax.Array) -> jax.Array:
  return jnp.where(jnp.isnan(average), value, 0.9 * average + 0.1 * value)


def _scale_roles(parts: _parts.Parts, updates: Tree, options: StepOptions) -> Tree:
  """Updates times the factor of their role, else of their slot, as updates are linear in it."""
  rates, slots = optimizers.role_rates(options.role_rates), _slots(parts)
  factors = {p: rates.get(slot.role or str(p[-1]), slot.rate) for p, slot in slots.items()}
  if all(factor == 1 for factor in factors.values()):
    return updates
  return _parts.nest({p: u * factors.get(p, 1.0) for p, u in _parts.flat(updates).items()})


def check_roles(parts: _parts.Parts, options: StepOptions) -> None:
  """Raises ValueError for a role in `role_rates` that no trainable slot has."""
  roles = slot_roles(parts)
  known = sorted({roles[path] for path in _parts.flat(partition(parts)[0])})
  for role in optimizers.role_rates(options.role_rates):
    fields.check_choice('train.role_rates', role, known)


def slot_roles(parts: _parts.Parts) -> dict[tuple, str]:
  """{path of an adapter array: the role of its slot, or the last word of its path}."""
  roles = {path: str(path[-1]) for path in _parts.flat(parts.adapter)}
  return roles | {p: slot.role or str(p[-1]) for p, slot in _slots(parts).items()}


def _slots(parts: _parts.Parts) -> dict[tuple, Slot]:
  """{path of an adapter array: its slot}."""
  nodes = nnx.iter_graph(_parts.outline(parts))
  return {
    (*path, name): slot
    for path, node in nodes
    if isinstance(node, _layer.Attached)
    for name, slot in node.slots().items()
  }

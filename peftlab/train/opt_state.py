"""What a step changes besides the adapter: the optimizer's state, the model's, a few numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from peftlab import _padded, _parts, _processes
from peftlab.models import routing
from peftlab.train import config, optimizers

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
  """What a compiled step depends on; the learning rate and the weight decay are arrays instead.

  Attributes: see `config.TrainConfig`.
  """

  optimizer: str = 'adamw'
  schedule: str = 'constant'
  steps: int = 1
  warmup_steps: int = 0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  clip_norm: float = 0.0
  accumulate: int = 1
  load_balancing: float = 0.0
  spike_skip: float = 0.0
  role_rates: tuple[str, ...] = ()

  @classmethod
  def of(cls, train: config.TrainConfig) -> StepOptions:
    """The options of a config."""
    return cls(**{f.name: getattr(train, f.name) for f in dataclasses.fields(cls)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptState:
  """What a step changes besides the adapter; a pytree.

  Attributes:
    inner: the optimizer's own, with moments of trainable arrays only.
    state: the model's (dropout's rng), like `Parts.state`.
    step: [] int32, updates done or left out.
    skipped: [] int32, updates left out (not finite, or a spike).
    average: [] float32, running mean of the loss; NaN before the first.
    learning_rate: [] float32, the highest.
    weight_decay: [] float32.
  """

  inner: Tree
  state: Tree
  step: jax.Array
  skipped: jax.Array
  average: jax.Array
  learning_rate: jax.Array
  weight_decay: jax.Array


def training_parts(model: nnx.Module, *, recording: bool = False) -> _parts.Parts:
  """The parts of `model` in training mode (dropout on); the model given is untouched.

  The adapter's arrays are copies, for the step donates them; the base's are the very same. With
  `recording` its routers keep a record, which `load_balancing` needs.
  """
  model = routing.record_routing(model) if recording else _parts.merge(_parts.split(model))
  model.train()
  parts = _parts.split(model)
  return parts.replace(adapter=_copied(parts.adapter))


def partition(parts: _parts.Parts) -> tuple[Tree, Tree]:
  """(trainable, frozen) arrays of the adapter, as nested dicts; together they are all of it."""
  flags, leaves = _parts.flat(_parts.trainable(parts)), _parts.flat(parts.adapter)
  moves = {p for p, leaf in leaves.items() if flags[p] and jnp.issubdtype(leaf.dtype, jnp.inexact)}
  trained = {path: leaf for path, leaf in leaves.items() if path in moves}
  frozen = {path: leaf for path, leaf in leaves.items() if path not in moves}
  return _parts.nest(trained), _parts.nest(frozen)


def combine(trained: Tree, frozen: Tree) -> Tree:
  """Inverse of `partition`."""
  return _parts.nest(_parts.flat(trained) | _parts.flat(frozen))


def init_opt_state(
  parts: _parts.Parts, options: StepOptions, *, learning_rate: float, weight_decay: float = 0.0
) -> OptState:
  """The first state: every moment lies as its array does, every number on all of its devices.

  Raises:
    ValueError: the adapter has no trainable array.
  """
  trained, _ = partition(parts)
  if not jax.tree.leaves(trained):
    raise ValueError('The adapter has no trainable array, so there is nothing to train.')
  beside = _replicated(jax.tree.leaves(trained)[0].sharding)
  found = optimizer(options, 1.0, 0.0).init(_padded.cut_tree(trained))

  def number(value: float, dtype: Any = jnp.float32) -> jax.Array:
    return _processes.put(jnp.asarray(value, dtype), beside)

  def placed(array: jax.Array) -> jax.Array:
    """What lies on one device while the adapter lies on a mesh goes to all of it."""
    alone = len(array.sharding.device_set) < len(beside.device_set)
    return _processes.put(array, beside if alone or not array.ndim else array.sharding)

  return OptState(
    inner=stored_as(jax.tree.map(placed, found), trained),
    state=jax.tree.map(placed, _copied(parts.state)),
    step=number(0, jnp.int32),
    skipped=number(0, jnp.int32),
    average=number(jnp.nan),
    learning_rate=number(learning_rate),
    weight_decay=number(weight_decay),
  )


def stored_as(inner: Tree, trained: Tree) -> Tree:
  """An optimizer's state in which a moment of a padded array is padded as that is."""
  wide = {p: a for p, a in _parts.flat(trained).items() if _padded.is_padded(a)}

  def moment(path: tuple, leaf: Any) -> Any:
    keys = tuple(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', None))) for k in path)
    same = [a for p, a in wide.items() if keys[-len(p) :] == p and a.shape == leaf.shape]
    return _padded.place_tree(leaf, same[0]) if same else leaf

  return jax.tree_util.tree_map_with_path(moment, inner) if wide else inner


def _copied(tree: Tree) -> Tree:
  return jax.tree.map(lambda a: jax.device_put(jnp.copy(a), a.sharding), tree)


def _replicated(sharding: Any) -> Any:
  if isinstance(sharding, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return sharding


def optimizer(
  options: StepOptions, rate: optimizers.Number, weight_decay: optimizers.Number
) -> optax.GradientTransformation:
  """The optimizer that some options name, behind the clipping they ask for."""
  make = optimizers.optimizers.get(options.optimizer)
  found = make(rate, weight_decay=weight_decay, b1=options.b1, b2=options.b2, eps=options.eps)
  if options.clip_norm:
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), found)
  return found

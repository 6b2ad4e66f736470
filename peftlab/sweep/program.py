"""The program of a pack: the same update, mapped over trials, on one base that is not mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import os
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _parts, _specs
from peftlab.sweep import items, padding
from peftlab.train import loss, step
from peftlab.train.opt_state import OptState, StepOptions, partition

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
  """What all trials of a pack have in common.

  Attributes:
    parts: of the carrier, in training mode: shapes, shardings, and the shared base.
    evaluated: the same in evaluation mode.
    state: the optimizer's, for the carrier.
    variants: the different options of the trials' steps; each trial has the number of its own.
    lengths: {path: dimensions} of the arrays that are padded for some trial.
    mesh: where the base lies.
  """

  parts: _parts.Parts
  evaluated: _parts.Parts
  state: OptState
  variants: tuple[StepOptions, ...]
  lengths: Mapping[str, int]
  mesh: jax.sharding.Mesh | None = None

  @property
  def tree(self) -> tuple[Tree, OptState]:
    """(adapter, optimizer state) of one trial."""
    return self.parts.adapter, self.state


@dataclasses.dataclass(frozen=True)
class Trees:
  """The arrays of the trials of a pack, with the trial axis at 0.

  Attributes:
    adapter: like `Parts.adapter`.
    state: like `OptState`.
    which: int32 [trials], the variant of each.
    lengths: {path: int32 [trials, dimensions]}.
  """

  adapter: Tree
  state: OptState
  which: jax.Array
  lengths: dict[str, jax.Array]


jax.tree_util.register_dataclass(Trees)


def update(
  graph: nnx.GraphDef,
  variants: Sequence[StepOptions],
  trees: Trees,
  base: Tree,
  batch: loss.Batch,
) -> tuple[Trees, step.Metrics]:
  """One update of every trial: `step.update`, mapped over the trial axis.

  Options that are part of a program (schedule, betas, clipping) are branches of it: gradients are
  taken once, and each trial takes the update of its own branch.

  Args:
    graph: of the carrier.
    variants: of the trials' steps.
    trees: the trials' arrays.
    base: the frozen arrays, which no trial axis reaches.
    batch: arrays [trials, rows, length].

  Returns:
    The new arrays, and metrics [trials].
  """

  def one(trees: Trees, batch: loss.Batch) -> tuple[Trees, step.Metrics]:
    state = trees.state
    parts = _parts.Parts(graph, trees.adapter, base, state.state)
    value, grads, after = step.gradients(
      parts, batch, variants[0].accumulate, variants[0].load_balancing
    )
    grads = padding.masked(grads, trees.lengths)

    def branch(options: StepOptions) -> Any:
      return lambda: step.finish(options, parts, state, (value, grads, after), batch)

    branches = [branch(options) for options in variants]
    found = branches[0]() if len(branches) == 1 else jax.lax.switch(trees.which, branches)
    adapter, state, metrics = found
    return dataclasses.replace(trees, adapter=adapter, state=state), metrics

  return jax.vmap(one)(trees, dict(batch))


class Program:
  """The compiled update of a pack of one size, and its evaluation.

  Attributes:
    template: what its trials share.
    size: how many trials it trains.
  """

  def __init__(self, template: Template, size: int, batch: Mapping[str, np.ndarray]):
    """Compiles the update.

    Args:
      template: what its trials share.
      size: how many they are.
      batch: of one trial, for its shapes.
    """
    self.template, self.size = template, size
    trees, rows = self._trees(), self._rows(batch)
    base = jax.tree.map(_shape_of, template.parts.base)
    leaves, tree = jax.tree.flatten((trees, base, rows))
    self._compiled = _compiled(
      template.parts.graph, template.variants, template.mesh, tuple(map(_Form.of, leaves)), tree
    )

  def _trees(self) -> Trees:
    """The shapes of the trees, with the trial axis, and where they lie."""
    adapter, state = jax.tree.map(self._stacked, self.template.tree)
    beside = state.step.sharding
    which: Any = jax.ShapeDtypeStruct((self.size,), jnp.int32, sharding=beside)
    lengths: Any = {
      name: jax.ShapeDtypeStruct((self.size, count), jnp.int32, sharding=beside)
      for name, count in self.template.lengths.items()
    }
    return Trees(adapter, state, which, lengths)

  def _stacked(self, array: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = stacked_sharding(array.sharding)
    return jax.ShapeDtypeStruct((self.size, *array.shape), array.dtype, sharding=sharding)

  def _rows(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = batch_sharding(self.template.mesh)
    return {
      name: jax.ShapeDtypeStruct((self.size, *a.shape), a.dtype, sharding=sharding)
      for name, a in batch.items()
    }

  @property
  def nbytes(self) -> int:
    """Bytes on one device while the update runs, base included: the compiler's own figure."""
    found: Any = self._compiled.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(held + found.temp_size_in_bytes + found.generated_code_size_in_bytes)

  def __call__(
    self, trees: Trees, batches: Sequence[Mapping[str, np.ndarray]]
  ) -> tuple[Trees, step.Metrics]:
    """One update of every trial, each on a batch of its own; the trees are donated."""
    sharding = batch_sharding(self.template.mesh)
    batch = {
      name: jax.device_put(np.stack([b[name] for b in batches]), sharding) for name in batches[0]
    }
    with _specs.using(self.template.mesh):
      return self._compiled(trees, self.template.parts.base, batch)


@dataclasses.dataclass(frozen=True)
class _Form:
  """The shape of an array and where it lies, hashable."""

  shape: tuple[int, ...]
  dtype: Any
  sharding: Any

  @classmethod
  def of(cls, array: Any) -> _Form:
    return cls(array.shape, array.dtype, array.sharding)

  def array(self) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)


@functools.lru_cache(maxsize=8)
def _compiled(
  graph: nnx.GraphDef,
  variants: tuple[StepOptions, ...],
  mesh: jax.sharding.Mesh | None,
  forms: tuple[_Form, ...],
  tree: Any,
) -> Any:
  """The compiled update; the same one for every pack of the same trials' shapes."""
  trees, base, rows = jax.tree.unflatten(tree, [form.array() for form in forms])
  shardings = jax.tree.map(lambda a: a.sharding, trees)
  run = functools.partial(update, graph, variants)
  jitted = jax.jit(run, donate_argnums=(0,), out_shardings=(shardings, None))
  with _specs.using(mesh):
    return jitted.lower(trees, base, rows).compile()


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def stacked_sharding(sharding: Any) -> Any:
  """The sharding of arrays with a trial axis in front, which is not split."""
  if isinstance(sharding, jax.sharding.NamedSharding):
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh, spec)
  return sharding


def batch_sharding(mesh: jax.sharding.Mesh | None) -> Any:
  """Where batches [trials, rows, length] lie."""
  if mesh is None:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])
  spec = _specs.spec_for(('batch', 'length'), mesh)
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, *spec))


def row_losses(template: Template, trees: Trees, batch: loss.Batch) -> Any:
  """(summed losses [trials, rows], tokens [rows]) of one held-out batch, which all trials share."""
  run = _row_losses(template.evaluated.graph)
  with _specs.using(template.mesh):
    evaluated = template.evaluated
    return run(trees.adapter, evaluated.base, evaluated.state, dict(batch))


@functools.lru_cache(maxsize=16)
def _row_losses(graph: nnx.GraphDef) -> Any:
  @jax.jit
  def run(adapter: Tree, base: Tree, state: Tree, batch: loss.Batch) -> Any:
    one = functools.partial(items.row_losses, graph)
    sums, tokens = jax.vmap(one, in_axes=(0, None, None, None))(adapter, base, state, batch)
    return sums, tokens[0]

  return run


@jax.jit
def take(trees: tuple[Tree, OptState], index: jax.Array) -> tuple[Tree, OptState]:
  """The arrays of one trial."""
  return jax.tree.map(lambda a: a[index], trees)


@functools.partial(jax.jit, donate_argnums=(0,))
def put(trees: Trees, index: jax.Array, one: Trees) -> Trees:
  """The arrays with those of one trial exchanged."""
  return jax.tree.map(lambda a, b: a.at[index].set(b), trees, one)


def stack(ones: Sequence[Trees]) -> Trees:
  """The arrays of some trials, the trial axis in front; they lie as each of them does."""

  def together(*arrays: jax.Array) -> jax.Array:
    return jax.device_put(jnp.stack(arrays), stacked_sharding(arrays[0].sharding))

  return jax.tree.map(together, *ones)


def select(trees: Trees, indices: Sequence[int]) -> Trees:
  """The arrays of some trials of a pack, as a smaller pack."""
  chosen = np.array(indices, np.int32)
  return jax.tree.map(lambda a: jax.device_put(a[chosen], a.sharding), trees)


def one(template: Template, adapter: Tree, state: OptState, options: StepOptions) -> Trees:
  """The arrays of a trial, padded into the carrier's."""
  beside = template.state.step.sharding
  sizes = padding.lengths(adapter, template.parts.adapter)
  whole = _parts.flat(template.parts.adapter)
  lengths = {}
  for name in template.lengths:
    path = next(p for p in whole if _parts.path_name(p) == name)
    lengths[name] = sizes.get(name, np.array(whole[path].shape, np.int32))
  which = template.variants.index(options)
  return Trees(
    padding.pad_tree(adapter, template.parts.adapter),
    padding.pad_state(state, template.state),
    jax.device_put(np.int32(which), beside),
    {name: jax.device_put(length, beside) for name, length in lengths.items()},
  )


def padded_lengths(template: _parts.Parts, trees: Sequence[Tree]) -> dict[str, int]:
  """{path: dimensions} of the trainable arrays that are padded for some of the adapters."""
  trained = _parts.flat(partition(template)[0])
  names = {_parts.path_name(path): array.ndim for path, array in trained.items()}
  found: dict[str, int] = {}
  for tree in trees:
    padded = padding.lengths(tree, template.adapter)
    found |= {name: names[name] for name in padded if name in names}
  return dict(sorted(found.items()))


def most_bytes(base: Tree) -> int:
  """Bytes that a pack may take on one device, its base included."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'bytes_limit' in stats:
    return int(stats['bytes_limit'] * 0.9)
  pages = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  for line in _meminfo():
    if line.startswith('MemAvailable:'):
      pages = int(line.split()[1]) * 1024
  return int(pages * 0.8) + _parts.nbytes(base)


def _meminfo() -> list[str]:
  try:
    with open('/proc/meminfo', encoding='ascii') as file:
      return file.read().splitlines()
  except FileNotFoundError:  # not Linux: the free pages alone are known
    return []


def choose_size(template: Template, batch: Mapping[str, np.ndarray], *, most: int) -> Program:
  """The largest program of at most `most` trials that fits, by the compiler's own figures.

  Raises:
    ValueError: not even one trial fits.
  """
  limit = most_bytes(template.parts.base)
  program = Program(template, most, batch)
  if program.nbytes <= limit or most == 1:
    return program
  one_trial = Program(template, 1, batch)
  each = max((program.nbytes - one_trial.nbytes) / (most - 1), 1.0)
  size = 1 + int((limit - one_trial.nbytes) // each)
  if size < 1:
    raise ValueError(
      f'One trial takes {one_trial.nbytes:,} bytes on a device, which has {limit:,} for it.'
    )
  size = min(size, most - 1)
  return one_trial if size == 1 else Program(template, size, batch)

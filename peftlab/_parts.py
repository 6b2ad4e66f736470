"""The protocol: a model as four parts, split and merged without copying an array."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _registry

Tree = Any


class AdapterParam(nnx.LoRAParam):
  """A trainable array of an adapter. Its type is what makes it one (law 4)."""


class AdapterConstant(AdapterParam):
  """A frozen array of an adapter: its scale, a random projection, a starting point."""


class Constant(nnx.Param):
  """A frozen array of the base that no optimizer should ever see: rope frequencies, windows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
  """A model as three trees over one graph; a pytree, so any jax transformation takes it.

  Attributes:
    graph: static, hashable; equal for two adapters of one type and rank, whatever their names.
    adapter: arrays of the adapters (`AdapterParam`, or any `nnx.LoRAParam`), as nested dicts.
    base: frozen arrays (other `nnx.Param`s and plain arrays), as nested dicts.
    state: what a forward pass may change (rng counts, caches, sown values), as nested dicts.
  """

  graph: nnx.GraphDef = dataclasses.field(metadata={'static': True})
  adapter: Tree
  base: Tree
  state: Tree

  def replace(self, **trees: Tree) -> Parts:
    """The same parts with some of the trees exchanged."""
    return dataclasses.replace(self, **trees)


def _is_base(path: tuple, leaf: Any) -> bool:
  del path
  return isinstance(leaf, nnx.Param) or not isinstance(leaf, nnx.Variable)


def split(model: nnx.Module) -> Parts:
  """The parts of `model`. Every array in them is the very object the model holds (law 1).

  Raises:
    ValueError: `model` is not an nnx module.
  """
  if not isinstance(model, nnx.Module):
    raise ValueError(f'split takes an nnx.Module, given {type(model).__name__}.')
  graph, *states = nnx.split(model, nnx.LoRAParam, _is_base, ...)
  return Parts(graph, *(nnx.to_pure_dict(state) for state in states))


def merge(parts: Parts) -> nnx.Module:
  """The model of `parts`, with new Variables around the same arrays: inverse of `split`.

  Raises:
    ValueError: not Parts, or a tree lacks an array of the graph or has another one.
  """
  if not isinstance(parts, Parts):
    raise ValueError(f'merge takes Parts (see split), given {type(parts).__name__}.')
  # nnx.merge goes by order alone: under a wrong name an array would land in another's place.
  for name, expected in _paths(parts.graph).items():
    given = getattr(parts, name)
    given = set(flat(given)) if isinstance(given, Mapping) else {(f'<{type(given).__name__}>',)}
    if given != expected:
      raise ValueError(_mismatch(name, given, expected))
  return nnx.merge(parts.graph, parts.adapter, parts.base, parts.state)


@functools.lru_cache(maxsize=1024)
def _paths(graph: nnx.GraphDef) -> dict[str, frozenset[tuple]]:
  """The paths of the arrays that belong to a graph, by tree."""
  numbers = {i: i for i in range(graph.num_leaves or 0)}
  parts = split(nnx.merge(graph, numbers))
  return {n: frozenset(flat(getattr(parts, n))) for n in ('adapter', 'base', 'state')}


def _mismatch(name: str, given: set[tuple], expected: frozenset[tuple]) -> str:
  missing, extra = (sorted(map(path_name, x)) for x in (expected - given, given - expected))
  near = _registry.did_you_mean(extra[0], missing) if extra else ''
  said = [f'lacks {", ".join(missing[:6])}'] if missing else []
  said += [f'has {", ".join(extra[:6])}, which the graph does not know'] if extra else []
  return f'The {name} tree of these parts {" and ".join(said)}{near or "."}'


def evaluation_parts(model: nnx.Module) -> Parts:
  """The parts of `model` in evaluation mode (dropout off), on the very same arrays."""
  model = merge(split(model))
  model.eval()
  return split(model)


def variables(model: nnx.Module) -> dict[tuple, nnx.Variable]:
  """Every Variable of `model` by its path, each once."""
  return {p: v for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}


def trainable(parts: Parts) -> Tree:
  """A tree of bools like `parts.adapter`: False for the arrays that are declared frozen.

  Raises:
    ValueError: not Parts.
  """
  if not isinstance(parts, Parts):
    raise ValueError(f'trainable takes Parts (see split), given {type(parts).__name__}.')
  model = merge(parts.replace(**_placeholders(parts)))
  flags = {
    path: not isinstance(v, AdapterConstant)
    for path, v in variables(model).items()
    if isinstance(v, nnx.LoRAParam)
  }
  return nnx.traversals.unflatten_mapping(flags)


def _placeholders(parts: Parts) -> dict[str, Tree]:
  names = ('adapter', 'base', 'state')
  return {n: jax.tree.map(lambda _: 0, getattr(parts, n)) for n in names}


def outline(graph_of: Parts) -> nnx.Module:
  """The model of some parts with 0 for every array: to read or edit its metadata."""
  return merge(graph_of.replace(**_placeholders(graph_of)))


def path_name(path: tuple) -> str:
  """('layers', 'q', 'kernel') -> 'layers.q.kernel'."""
  return '.'.join(str(key) for key in path)


def flat(tree: Tree) -> dict[tuple, Any]:
  """Nested dicts -> {path: array}."""
  return nnx.traversals.flatten_mapping(tree)


def nest(leaves: dict[tuple, Any]) -> Tree:
  """{path: array} -> nested dicts: inverse of `flat`."""
  return nnx.traversals.unflatten_mapping(leaves)


def is_key(array: Any) -> bool:
  """Whether an array, or the shape of one, holds random keys."""
  return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def bits(dtype: Any) -> int:
  """Bits of one element: 4 for int4, where `itemsize` says 1 byte."""
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.iinfo(dtype).bits
  if jnp.issubdtype(dtype, jnp.inexact) and not jnp.issubdtype(dtype, jnp.complexfloating):
    return jnp.finfo(dtype).bits
  if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys, of which numpy knows nothing
    return dtype.itemsize * 8
  return jnp.dtype(dtype).itemsize * 8


def nbytes(tree: Any) -> int:
  """Bytes that the arrays of `tree` take on all devices together.

  Unique device buffers x bit width: a replicated array counts once per device, two references
  to one array count once; devices of other processes hold what those of this one do. Shapes
  without arrays (`jax.ShapeDtypeStruct`) count as on one device.

  Args:
    tree: an nnx module, Parts, or any pytree of arrays.
  """
  if isinstance(tree, nnx.Module):
    tree = split(tree)
  seen: dict[Any, int] = {}
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, nnx.Variable):
      leaf = leaf.get_value()
    if isinstance(leaf, jax.Array) and is_key(leaf):
      leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
      everywhere = leaf.sharding.num_devices // max(len(leaf.addressable_shards), 1)
      for shard in leaf.addressable_shards:
        key = (shard.device.id, shard.data.unsafe_buffer_pointer())
        seen[key] = (shard.data.size * bits(leaf.dtype) + 7) // 8 * everywhere
    elif hasattr(leaf, 'shape') and hasattr(leaf, 'dtype'):
      seen[id(leaf)] = (math.prod(leaf.shape) * bits(leaf.dtype) + 7) // 8
  return sum(seen.values())


def shared_base(before: Any, after: Any) -> tuple[int, int, list[str]]:
  """(how many base arrays of `before` are in `after` at the same path, of how many, the others)."""
  old, new = (flat(_base(x)) for x in (before, after))
  lost = [path_name(p) for p, leaf in old.items() if not _same(leaf, new.get(p))]
  return len(old) - len(lost), len(old), lost


def assert_base_shared(before: Any, after: Any) -> str:
  """Asserts that every base array of `before` is the same object in `after` (law 1).

  Args:
    before: a model, Parts, or a base tree (nested dicts).
    after: likewise.

  Returns:
    'n/n', the count of shared arrays.

  Raises:
    AssertionError: naming the arrays that were copied or are gone.
  """
  shared, total, lost = shared_base(before, after)
  if lost:
    names = ', '.join(lost[:8]) + (f' and {len(lost) - 8} more' if len(lost) > 8 else '')
    raise AssertionError(f'{len(lost)} of {total} base arrays are not shared: {names}.')
  return f'{shared}/{total}'


def _base(x: Any) -> Tree:
  if isinstance(x, nnx.Module):
    x = split(x)
  return x.base if isinstance(x, Parts) else x


def _same(a: Any, b: Any) -> bool:
  left, right = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))

"""One layer of a stack: runs the body, sorts Variables into kept, created, replaced, rest."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _parts, _stack
from peftlab.appliers import applier, remat

NAMES = ('adapter', 'base', 'state')
Leaves = dict[str, dict[tuple, Any]]


@dataclasses.dataclass
class Layer:
  """One layer of a stack as a pure function; what the last trace of it found is kept aside.

  Attributes:
    layers: the stack.
    stacked: how it is stacked.
    body: see `Applier.apply`.
    context: likewise.
    policy: what the backward pass recomputes (see `remat`).
    in_loop: whether one trace runs for every layer.
  """

  layers: _parts.Parts
  stacked: _stack.Stacked
  body: applier.Body
  context: tuple
  policy: str = 'none'
  in_loop: bool = False
  graph_after: nnx.GraphDef | None = None
  gone: tuple[tuple[str, tuple], ...] = ()

  def __call__(self, leaves: Leaves, x: Any) -> tuple[Any, Leaves]:
    """(arrays of one layer, x) -> (x after it, its new arrays and its whole state)."""
    return remat.wrap(self.run, self.policy, in_loop=self.in_loop)(leaves, x)

  def run(self, leaves: Leaves, x: Any) -> tuple[Any, Leaves]:
    """`__call__` without remat."""
    before = _parts.Parts(self.stacked.graph, **{name: _parts.nest(leaves[name]) for name in NAMES})
    model = _parts.merge(before)
    y = self.body(model, x, *self.context)
    after = _parts.split(model)
    self.graph_after = after.graph
    return _same_dtypes(y, x), self._new(leaves, after)

  def _new(self, leaves: Leaves, after: _parts.Parts) -> Leaves:
    new: Leaves = {}
    gone = []
    for name in NAMES:
      now = _parts.flat(getattr(after, name))
      gone += [(name, path) for path in leaves[name] if path not in now]
      if name == 'state':
        new[name] = now
        continue
      old = leaves[name]
      for path, value in now.items():
        if path not in old or _is(value, old[path]):
          continue
        if _outline(value) == _outline(old[path]):
          raise ValueError(
            f'{_parts.path_name(path)} is a kept {name} array of a layer, and the body changed it '
            'in place; create a new Variable, or keep what changes in state.'
          )
        gone.append((name, path))
      new[name] = {p: v for p, v in now.items() if p not in old or (name, p) in gone}
    self.gone = tuple(sorted(gone, key=str))
    return new

  def created(self, new: Leaves) -> applier.Created:
    """The result of the stack from the new arrays at its places, stacked along axis 0."""
    axes = {name: self._axes(name, new[name]) for name in NAMES}
    placed = {
      name: {
        path: jax.tree.map(lambda a, to=axes[name][path]: jnp.moveaxis(a, 0, to), value)
        for path, value in new[name].items()
      }
      for name in NAMES
    }
    if self.graph_after == self.stacked.graph:
      graph = self.layers.graph
    else:
      graph = self._graph(new, axes)
    return applier.Created(graph, self.gone, **placed)

  def _axes(self, name: str, new: dict[tuple, Any]) -> dict[tuple, int]:
    known = self.stacked.axes[name]
    kernel_axes = [a for n in ('base', 'adapter') for a in self.stacked.axes[n].values() if a]
    layer_axis = max(kernel_axes, default=0) if name != 'state' else 0
    axes: dict[tuple, int] = {}
    for path, value in new.items():
      rank = min(leaf.ndim for leaf in jax.tree.leaves(value))
      axis = known.get(path)
      axes[path] = min(layer_axis, rank - 1) if axis is None else axis
    return axes

  def _graph(self, new: Leaves, axes: dict[str, dict[tuple, int]]) -> nnx.GraphDef:
    """The graph of one layer after the body -> of the stack, each Variable's metadata with it."""
    old = _parts.variables(_parts.outline(self.layers))
    kept = {n: {p for p in self.stacked.axes[n] if (n, p) not in self.gone} for n in NAMES}
    assert self.graph_after is not None
    blanks = {n: _parts.nest(dict.fromkeys(kept[n] | set(new[n]), 0)) for n in NAMES}
    model = _parts.merge(_parts.Parts(self.graph_after, **blanks))
    for path, variable in _parts.variables(model).items():
      was = old.get(path)
      name = next(n for n in NAMES if path in axes[n] or path in kept[n])
      if was is not None and type(was) is type(variable) and (name, path) not in self.gone:
        variable.set_metadata(was.get_metadata())
        continue
      _stack.add_axis(variable, axes[name][path], 'layers')
    return _parts.split(model).graph


def at_places(new: Leaves, stacked: _stack.Stacked) -> Leaves:
  """What the layers made, in layer order along axis 0, at the places of the stack."""
  if stacked.in_order:
    return new
  source = jnp.asarray([max(number, 0) for number in stacked.order])
  return jax.tree.map(lambda a: jnp.take(a, source, axis=0), new)


def _is(a: Any, b: Any) -> bool:
  left, right = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))


def _outline(value: Any) -> Any:
  """Structure, shapes and dtypes: where these are others, a Variable was replaced, not changed."""
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), value)


def _same_dtypes(y: Any, x: Any) -> Any:
  """The carry after a layer with the dtypes it had before.

  Raises:
    ValueError: it has another structure or other shapes.
  """
  told = [str(jax.tree.map(jnp.shape, tree)) for tree in (x, y)]
  if told[0] != told[1]:
    raise ValueError(f'A layer turned a carry of shapes {told[0]} into {told[1]}.')
  return jax.tree.map(_as_before, y, x)


def _as_before(new: jax.Array, old: jax.Array) -> jax.Array:
  dtype = jnp.asarray(old).dtype
  return new if jnp.asarray(new).dtype == dtype else new.astype(dtype)

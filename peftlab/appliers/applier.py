"""The contract of an applier: runs a stack of layers, on Parts, in one signature."""

from __future__ import annotations

import abc
from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
import jax

from peftlab import _parts, _registry, _stack
from peftlab.appliers import layout

Body = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Created:
  """What the layers of a stack made or changed while they ran; a pytree, so a jit can return it.

  Attributes:
    graph: of the stack with what was created in it and what was replaced gone.
    gone: {'adapter' | 'base' | 'state': paths that are no more}, as sorted tuples.
    adapter: new arrays, by path, stacked like their layer.
    base: likewise.
    state: every array of the state after the layers, by path.
  """

  graph: nnx.GraphDef = dataclasses.field(metadata={'static': True})
  gone: tuple[tuple[str, tuple], ...] = dataclasses.field(metadata={'static': True})
  adapter: dict[tuple, Any]
  base: dict[tuple, Any]
  state: dict[tuple, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applier(abc.ABC):
  """Runs the layers of a stack one after the other. A frozen dataclass; its fields are its flags.

  Attributes:
    axis: the layer axis of arrays whose Variable does not say (`stack` metadata).
  """

  axis: int = 0

  @abc.abstractmethod
  def apply(self, layers: _parts.Parts, x: Any, body: Body, *context: Any) -> tuple[Any, Created]:
    """Runs `x = body(layer, x, *context)` for every layer.

    Args:
      layers: a stack; every base array of it is used where it lies, never copied whole.
      x: a pytree of arrays, carried from layer to layer; each keeps its dtype.
      body: a function of the model of one layer, x and the context. It may change the layer's
        state, create Variables in it and replace a weight by others.
      *context: given to every layer as it is (positions, masks, segment ids).

    Returns:
      What the last layer gave, and what the layers created or changed (see `absorb`).

    Raises:
      ValueError: a body changes a kept array of base or adapter in place (its path is named), or
        the arrays of the stack disagree on the number of layers.
    """

  def lay_out(self, layers: nnx.Module, mesh: Any = None, *, donate: bool = False) -> nnx.Module:
    """The stack with its arrays in the order this applier needs on a mesh: here that of the layers.

    Args:
      layers: a stack, of arrays or of shapes, in any order.
      mesh: default: the one in context.
      donate: each array given is freed once it has been read.

    Returns:
      A new module; the one given where it is in that order already.
    """
    del mesh
    stacked = _stack.stacked(_parts.split(layers), self.axis)
    return layout.reorder(layers, tuple(range(stacked.length)), axis=self.axis, donate=donate)

  def for_batch(self, rows: int) -> Applier:
    """The applier as it runs on so many rows, where they are fewer than it was made for."""
    del rows
    return self

  def run(self, layers: nnx.Module, x: Any, body: Body, *context: Any) -> tuple[Any, nnx.Module]:
    """`apply` on a module: x after the layers, and the module as they left it.

    Where only state changed, the module given is updated in place and returned.
    """
    parts = _parts.split(layers)
    y, created = self.apply(parts, x, body, *context)
    if created.graph == parts.graph:
      nnx.update(layers, _parts.nest(created.state))
      return y, layers
    return y, _parts.merge(absorb(parts, created))


def absorb(layers: _parts.Parts, created: Created) -> _parts.Parts:
  """The stack with what its layers created put in; every kept array is the very same object."""
  trees = {}
  for name in ('adapter', 'base', 'state'):
    leaves = _parts.flat(getattr(layers, name))
    for kind, path in created.gone:
      if kind == name:
        del leaves[path]
    trees[name] = _parts.nest(leaves | getattr(created, name))
  return _parts.Parts(created.graph, **trees)


def nothing_created(layers: _parts.Parts) -> Created:
  """The result of a stack without layers."""
  return Created(layers.graph, (), {}, {}, _parts.flat(layers.state))


def get_applier(name: str | Applier, **fields: Any) -> Applier:
  """The applier of a registered name ('scan') with some fields set, or the applier given.

  Raises:
    ValueError: no applier of that name, or it has no such field.
  """
  if isinstance(name, Applier):
    return dataclasses.replace(name, **fields)
  cls = _registry.appliers.get(name)
  known = [field.name for field in dataclasses.fields(cls)]
  for field in fields:
    if field not in known:
      near = _registry.did_you_mean(field, known)
      raise ValueError(f'The applier {name!r} has no field {field!r}{near or "."}')
  return cls(**fields)

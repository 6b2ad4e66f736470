"""What an adapter type adds to training: a penalty on the loss, new values after an update."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _layer, _parts

Tree = Any


def penalty(model: nnx.Module) -> jax.Array | None:
  """The mean penalty of the kernels of a model's active adapters; None: they have none."""
  found = []
  for node in _attached(model).values():
    if not node.active or type(node.adapter).penalty is _adapter.Adapter.penalty:
      continue
    arrays, _ = _stacked({n: getattr(node, n) for n in _own(node)})

    def one(arrays: dict[str, jax.Array], node: Any = node) -> Any:
      return node.adapter.penalty(_adapter.Values(arrays))

    each = jax.vmap(one)(arrays)
    if each is not None:
      found.append(each)
  return jnp.mean(jnp.concatenate(found)) if found else None


def after_step(
  parts: _parts.Parts, gradients: Tree, *, step: jax.Array, steps: int
) -> dict[tuple, jax.Array]:
  """{path: new array} of what the adapter types of a model change after an update.

  Args:
    parts: after the update.
    gradients: of the trainable arrays.
    step: [] int32, updates before this one.
    steps: of the whole run.
  """
  nodes = _attached(_parts.merge(parts))
  flat = _parts.flat(gradients)
  groups: dict[tuple, list[tuple]] = {}
  for path, node in nodes.items():
    if type(node.adapter).after_step is not _adapter.Adapter.after_step:
      groups.setdefault((node.adapter, node.name), []).append(path)
  changed = {}
  for (adapter, _), paths in groups.items():
    kernels, back = [], []
    for path in paths:
      variables = {n: getattr(nodes[path], n) for n in _own(nodes[path])}
      values, undo = _stacked(variables)
      grads = {n: _front(flat[(*path, n)], v) for n, v in variables.items() if (*path, n) in flat}
      kernels.append(_adapter.Kernel(values, grads))
      back.append(undo)
    for path, undo, new in zip(
      paths, back, adapter.after_step(kernels, step=step, steps=steps), strict=True
    ):
      changed |= {(*path, name): undo(name, array) for name, array in new.items()}
  return changed


def _attached(model: nnx.Module) -> dict[tuple, _layer.Attached]:
  return {p: node for p, node in nnx.iter_graph(model) if isinstance(node, _layer.Attached)}


def _own(node: _layer.Attached) -> list[str]:
  return [name for name, slot in node.slots().items() if not slot.shared]


def _front(array: jax.Array, variable: nnx.Variable) -> jax.Array:
  """An array with its layer axes as one, at the front."""
  stack = variable.get_metadata().get('stack', ())
  moved = jnp.moveaxis(array, stack, range(len(stack)))
  return moved.reshape(-1, *moved.shape[len(stack) :])


def _stacked(variables: dict[str, nnx.Variable]) -> tuple[dict[str, jax.Array], Any]:
  """({slot: array with one layer axis}, f(slot, such an array) -> as it lies)."""

  def undo(name: str, array: jax.Array) -> jax.Array:
    variable = variables[name]
    stack = variable.get_metadata().get('stack', ())
    layers = tuple(variable.shape[i] for i in stack)
    array = array.reshape(*layers, *array.shape[1:]).astype(variable.dtype)
    return jnp.moveaxis(array, range(len(stack)), stack)

  return {n: _front(v[...], v) for n, v in variables.items()}, undo

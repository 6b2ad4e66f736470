"""What an adapter type adds to training: a penalty on the loss, new values after an update."""

from __future__ import annotations

from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _layer, _parts, _sites

Tree = Any


def penalty(model: nnx.Module) -> jax.Array | None:
  """The mean penalty of the kernels of a model's active adapters; None: they have none."""
  found = []
  for node, site in _attached(model, 'penalty').values():
    if not node.active:
      continue
    arrays, _ = _stacked(node, site)

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
  nodes = _attached(_parts.merge(parts), 'after_step')
  flat = _parts.flat(gradients)
  groups: dict[tuple, list[tuple]] = {}
  for path, (node, _) in nodes.items():
    groups.setdefault((node.adapter, node.name), []).append(path)
  changed = {}
  for (adapter, _), paths in groups.items():
    kernels, back = [], []
    for path in paths:
      node, site = nodes[path]
      values, undo = _stacked(node, site)
      axes = _axes(node, site)
      grads = {n: _front(flat[(*path, n)], of) for n, of in axes.items() if (*path, n) in flat}
      kernels.append(_adapter.Kernel(values, grads))
      back.append(undo)
    for path, undo, new in zip(
      paths, back, adapter.after_step(kernels, step=step, steps=steps), strict=True
    ):
      changed |= {(*path, name): undo(name, array) for name, array in new.items()}
  return changed


def _attached(model: nnx.Module, hook: str) -> dict[tuple, tuple[_layer.Attached, _sites.Site]]:
  """{path: (adapter, its site)} of the adapters whose type has a hook of its own."""
  nodes = {p: node for p, node in nnx.iter_graph(model) if isinstance(node, _layer.Attached)}
  own = getattr(_adapter.Adapter, hook)
  nodes = {p: n for p, n in nodes.items() if getattr(type(n.adapter), hook) is not own}
  if not nodes:
    return {}
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of layers that cannot be adapted: attach has told of them
    sites = _sites.sites(model, norms=True, points=True)
  at = {id(a): site.under(a) for site in sites for a in getattr(site.layer, 'adapters', ())}
  return {path: (node, at[id(node)]) for path, node in nodes.items()}


def _axes(node: _layer.Attached, site: _sites.Site) -> dict[str, tuple[int, ...]]:
  """{slot: the axes of its array that count layers and experts}, shared slots left out."""
  return {name: site.slot_axes(slot) for name, slot in node.slots().items() if not slot.shared}


def _front(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """An array with some axes as one, at the front."""
  moved = jnp.moveaxis(array, axes, range(len(axes)))
  return moved.reshape(-1, *moved.shape[len(axes) :])


def _stacked(node: _layer.Attached, site: _sites.Site) -> tuple[dict[str, jax.Array], Any]:
  """({slot: array with one layer axis}, f(slot, such an array) -> as it lies)."""
  axes = _axes(node, site)

  def undo(name: str, array: jax.Array) -> jax.Array:
    variable, of = getattr(node, name), axes[name]
    layers = tuple(variable.shape[i] for i in of)
    array = array.reshape(*layers, *array.shape[1:]).astype(variable.dtype)
    return jnp.moveaxis(array, range(len(of)), of)

  return {name: _front(getattr(node, name)[...], of) for name, of in axes.items()}, undo

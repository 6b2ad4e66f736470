"""Checks layers of a type that a user registered: each must do what its registration says."""

from __future__ import annotations

from collections.abc import Sequence
import inspect
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _kernel, _layer, _parts, _sites, _stack

TOLERANCE = 0.05  # of the largest output: half precision passes, another matrix never does


def check(sites: Sequence[_sites.Site]) -> None:
  """Runs one layer of each site whose type asks for it, on random numbers.

  Without its bias it must give x W, whatever its other parameters hold, and with it x W + b.

  Raises:
    ValueError: it does not. The layout is another one, the bias has another name, or something
      comes before or after the product.
  """
  for site in sites:
    if site.kind.check and _can_run(site):
      _check(site)


def _can_run(site: _sites.Site) -> bool:
  """False for shapes, other hosts' arrays, a lookup, layers that carry adapters already."""
  weight = site.weight.get_raw_value()
  if isinstance(site.layer, _layer.AdaptedLayer) or site.layout.equation is None:
    return False
  return isinstance(weight, jax.Array) and weight.is_fully_addressable


def _check(site: _sites.Site) -> None:
  layer: Any = _perturbed(_one_layer(site.layer, site.stack), site.kind)
  required = [
    p.name
    for p in inspect.signature(layer).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]
  if len(required) != 1:
    raise ValueError(
      f'{site.name} of type {type(site.layer).__name__} is called with ({", ".join(required)}); '
      'only a layer called with its input alone can be checked: register it with check=False.'
    )
  x = _input(site)
  view = _kernel.View(layer, layer, x)
  kernel = np.asarray(_kernel.as_matrix(view.kernel[...], view.layout.words), np.float64)
  expected = np.asarray(view.enter(jnp.float32), np.float64) @ kernel
  bare = view.bare()
  _compare(site, view.flatten(bare), expected, 'without its bias')
  _compare(site, view.flatten(layer(x)), expected + np.asarray(view.bias(), np.float64), 'in all')


def _compare(site: _sites.Site, got: jax.Array, expected: np.ndarray, what: str) -> None:
  given = np.asarray(got, np.float64)
  same = given.shape == expected.shape
  if same and np.max(np.abs(given - expected)) <= TOLERANCE * np.max(np.abs(expected)):
    return
  kind = site.kind
  raise ValueError(
    f'{site.name} of type {type(site.layer).__name__} is registered with the layout '
    f"'{' '.join(site.layout.words)}', weight={kind.weight!r}, bias={kind.bias!r}; but {what} it "
    f'does not give x {kind.weight}{"" if kind.bias is None else " + " + kind.bias}. Give '
    'peftlab.register_layer its true layout and names; a layer that does more is not a linear map.'
  )


def _input(site: _sites.Site) -> jax.Array:
  """Random numbers [3, *in] as the layer takes them."""
  assert site.layout.equation is not None
  letters, kernel, _ = site.layout.equation(1 + site.layout.words.count('in'))
  sizes = dict(zip(kernel, site.shape, strict=True))
  shape = [sizes.get(c, 3) for c in letters]
  values = np.random.default_rng(0).standard_normal(shape)
  return jnp.asarray(values, jnp.float32)


def _one_layer(layer: nnx.Module, stack: tuple[int, ...]) -> nnx.Module:
  """The first layer of a stack."""
  parts = _parts.split(layer)
  axes = list(stack)
  while axes:
    axis = axes.pop(0)
    axes = [a - 1 if a > axis else a for a in axes]
    seen = _stack.stacked(parts, axis)
    trees = {}
    for name, where in seen.axes.items():
      leaves = _parts.flat(getattr(parts, name))
      trees[name] = _parts.nest({p: _first(leaf, where[p]) for p, leaf in leaves.items()})
    parts = _parts.Parts(seen.graph, **trees)
  return _parts.merge(parts)


def _first(value: Any, axis: int | None) -> Any:
  if axis is None:
    return value
  return jax.tree.map(lambda a: jax.lax.index_in_dim(a, 0, axis, keepdims=False), value)


def _perturbed(layer: nnx.Module, kind: _kernel.LayerType) -> nnx.Module:
  """The layer on a copy of its Variables, with noise on all parameters but the weight."""
  layer = _parts.merge(_parts.split(layer))
  generator = np.random.default_rng(1)
  for path, variable in _parts.variables(layer).items():
    value = variable.get_raw_value()
    noisy = isinstance(variable, nnx.Param) and not isinstance(variable, _parts.Constant)
    if noisy and path != (kind.weight,) and jnp.issubdtype(value.dtype, jnp.floating):
      noise = jnp.asarray(generator.standard_normal(value.shape), value.dtype)
      variable.set_raw_value(value + noise / math.sqrt(max(value.ndim, 1)))
  return layer

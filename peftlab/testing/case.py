"""One adapter type under test: models that carry it and what they compute, each made once."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from peftlab import _adapter, _attach, _parts
from peftlab.testing import models, probe

BATCH = 8
TOLERANCE = 1e-5
STEP = 0.02  # the length of a step of training


class NotApplicable(Exception):  # noqa: N818, it is no error
  """Raised by a property that says nothing about this adapter; the message says why."""


class Case:
  """An adapter under test. Models and results that several properties need are kept.

  Attributes:
    adapter: the instance.
    thorough: False: one mesh, one other applier and two layer types stand for all of them, in less
      than half the time.
  """

  def __init__(self, adapter: _adapter.Adapter | type, *, thorough: bool = True):
    self.adapter = sized(adapter)
    self.thorough = thorough
    self.programs: dict[Any, Any] = {}

  @property
  def point(self) -> str:
    """The role of the points that the adapter goes on; '': it goes on weights."""
    return self.adapter.point

  @property
  def where(self) -> str:
    """The layers of the suite's models that it goes on, whatever it goes on by default."""
    return self.point or 'all-linear'

  def needs_weights(self) -> None:
    """Raises NotApplicable for an adapter that goes on points."""
    if self.point:
      raise NotApplicable('it goes on points')

  def base_model(self, sizes: tuple[int, int] = models.EVEN, *, dtype: Any = None) -> nnx.Module:
    """The model without adapters: StackModel, or PointModel for an adapter that goes on points."""
    return base_model(sizes, dtype=dtype, points=bool(self.point))

  def list_model(self) -> nnx.Module:
    """The same layers in a list."""
    return list_model(points=bool(self.point))

  def base_output(self) -> jax.Array:
    """What the model computes without adapters."""
    return base_output(points=bool(self.point))

  @property
  def kernels(self) -> list[tuple[dict[str, int], int]]:
    """(sizes, layers) of every kernel, or point, that the adapter goes on in the model."""
    embed, mlp = models.EVEN
    if self.point:
      found = models.point_sizes(self.point)
      if not found:
        raise NotApplicable(f'no model of the suite has points of the role {self.point!r}')
      return [({'in': size, 'out': size}, layers) for size, layers in found]
    return [({'in': embed, 'out': mlp}, 2), ({'in': mlp, 'out': embed}, 2)]

  @functools.cached_property
  def attached(self) -> tuple[nnx.Module, Any]:
    """(the model with a fresh adapter, the report)."""
    return _attach.attach(self.base_model(), self.adapter, where=self.where, rngs=0)

  @functools.cached_property
  def fresh(self) -> _parts.Parts:
    """StackModel with a fresh adapter."""
    return _parts.split(self.attached[0])

  @functools.cached_property
  def random(self) -> _parts.Parts:
    """StackModel with random values in what training moves."""
    return randomized(self.fresh)

  @functools.cached_property
  def other(self) -> _parts.Parts:
    """Like `fresh`, of another seed."""
    return _parts.split(
      _attach.attach(self.base_model(), self.adapter, where=self.where, rngs=1)[0]
    )

  @functools.cached_property
  def listed(self) -> nnx.Module:
    """ListModel with a fresh adapter of the seed of `fresh`."""
    return _attach.attach(self.list_model(), self.adapter, where=self.where, rngs=0)[0]

  def is_shared(self, path: tuple) -> bool:
    """Whether the array at a path belongs to the whole model."""
    return self.adapter.slots()[path[-1]].shared

  def in_stack(self, path: tuple, array: jax.Array) -> jax.Array:
    """The array that `list_model` has at a path, of the one of the stack that it is part of."""
    numbered = isinstance(path[1], int) and not self.is_shared(path)
    return array[path[1]] if numbered else array

  @functools.cached_property
  def results(self) -> tuple[jax.Array, Any, Any]:
    """(outputs, loss, gradients) of `random` under scan."""
    y, loss, gradients = outputs_and_gradients(self.random, stack_input())
    return y, loss, gradients

  @functools.cached_property
  def first_results(self) -> tuple[jax.Array, Any, Any]:
    """Likewise of `fresh`."""
    return outputs_and_gradients(self.fresh, stack_input())

  @functools.cached_property
  def trained(self) -> _parts.Parts:
    """`fresh` after 3 steps of training."""
    return train(self.fresh, stack_input(), steps=3)

  @functools.cached_property
  def kernel(self) -> probe.Probe:
    """The adapter at one kernel, with random values."""
    return probe.probe(self.adapter)


def sized(adapter: _adapter.Adapter | type) -> _adapter.Adapter:
  """An instance for tiny models: a type gets its defaults and `small`, but rank 2 where it has one.

  What must divide a kernel's sizes becomes 2.

  Raises:
    ValueError: the type has a field without default, or refuses its defaults.
  """
  if isinstance(adapter, _adapter.Adapter):
    return adapter
  empty = [f.name for f in dataclasses.fields(adapter) if _without_default(f)]
  if empty:
    raise ValueError(
      f'{adapter.__name__} has fields without a default: {", ".join(empty)}; give an instance.'
    )
  fields = {f.name: f.default for f in dataclasses.fields(adapter)}
  small = dict(adapter.small) | ({'rank': 2} if isinstance(fields.get('rank'), int) else {})
  try:
    made = adapter(**small)
    parts = {word.partition('/')[2] for word in _adapter.divided(made)}
    return dataclasses.replace(made, **{name: 2 for name in parts if name in fields})
  except Exception as error:
    raise ValueError(f'{adapter.__name__} cannot be made with its defaults: {error}') from error


def times(adapter: _adapter.Adapter) -> int:
  """What the widths of odd models are multiplied by: 2 where something must divide them."""
  return 2 if _adapter.divided(adapter) else 1


def _without_default(field: dataclasses.Field) -> bool:
  missing = dataclasses.MISSING
  return field.init and field.default is missing and field.default_factory is missing


def base_model(
  sizes: tuple[int, int] = models.EVEN,
  applier: Any = 'scan',
  dtype: Any = None,
  *,
  points: bool = False,
) -> nnx.Module:
  """The StackModel, or PointModel, without adapters. One for all cases: nobody may write to it."""
  kind = models.PointModel if points else models.StackModel
  return _made(kind, sizes, applier, dtype)


@functools.cache
def _made(kind: Any, *options: Any) -> nnx.Module:
  """One for all cases; functools.cache tells arguments apart by how they are given."""
  sizes, applier, dtype = options
  return kind(sizes, applier=applier, dtype=dtype)


def list_model(*, points: bool = False) -> nnx.Module:
  """The ListModel, or a PointModel of a list, without adapters, likewise."""
  return _listed(points)


@functools.cache
def _listed(points: bool) -> nnx.Module:
  return models.PointModel(listed=True) if points else models.ListModel()


@functools.cache
def zoo_model(times: int = 1) -> nnx.Module:
  """The ZooModel without adapters, likewise."""
  return models.ZooModel(times)


@functools.cache
def stack_input(width: int = models.EVEN[0]) -> jax.Array:
  """x [batch, embed]."""
  return jax.random.normal(jax.random.key(11), (BATCH, width))


def base_output(*, points: bool = False) -> jax.Array:
  """What the model computes without adapters."""
  return forward(_parts.split(base_model(points=points)), stack_input())


def list_path(path: tuple) -> tuple:
  """The path in the stack of an array at a path of `list_model`."""
  return path[:1] + path[2:] if isinstance(path[1], int) else path


@jax.jit
def forward(parts: _parts.Parts, x: jax.Array) -> jax.Array:
  """The model's output."""
  return _parts.merge(parts)(x)


def _loss(adapter: Any, parts: _parts.Parts, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  y = _parts.merge(parts.replace(adapter=adapter))(x)
  target = jnp.flip(x, axis=0)
  return jnp.mean(jnp.square(y - target).astype(jnp.float32)), y


@jax.jit
def outputs_and_gradients(parts: _parts.Parts, x: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
  """(outputs, loss, gradients of every inexact array of the adapter)."""
  inexact, rest = partition(parts.adapter)

  def loss(some: Any) -> Any:
    return _loss(combine(some, rest), parts, x)

  (value, y), gradients = jax.value_and_grad(loss, has_aux=True)(inexact)
  return y, value, gradients


@functools.partial(jax.jit, static_argnames='steps')
def _train(adapter: Any, parts: _parts.Parts, x: jax.Array, steps: int) -> Any:
  def step(index: Any, adapter: Any) -> Any:
    del index
    inexact, rest = partition(adapter)

    def loss(some: Any, rest: Any = rest) -> Any:
      return _loss(combine(some, rest), parts, x)

    gradients, _ = jax.grad(loss, has_aux=True)(inexact)
    size = STEP / (optax.tree.norm(gradients) + 1e-12)

    def move(a: jax.Array, g: jax.Array, size: jax.Array = size) -> jax.Array:
      return a - (size * g).astype(a.dtype)

    return combine(jax.tree.map(move, inexact, gradients), rest)

  return jax.lax.fori_loop(0, steps, step, adapter)


def train(parts: _parts.Parts, x: jax.Array, *, steps: int) -> _parts.Parts:
  """The parts after steps of gradient descent on every inexact array of the adapter."""
  return parts.replace(adapter=_train(parts.adapter, parts, x, steps))


def partition(tree: Any) -> tuple[dict[tuple, Any], dict[tuple, Any]]:
  """(arrays that have gradients, the others) by path."""
  leaves = _parts.flat(tree)
  inexact = {p: a for p, a in leaves.items() if jnp.issubdtype(a.dtype, jnp.inexact)}
  return inexact, {p: a for p, a in leaves.items() if p not in inexact}


def combine(some: dict[tuple, Any], others: dict[tuple, Any]) -> Any:
  """Inverse of `partition`."""
  return _parts.nest(some | others)


def randomized(parts: _parts.Parts, *, seed: int = 3, by: float = 0.1) -> _parts.Parts:
  """The parts with noise added to every trainable array, the same whatever their layout."""
  flags = _parts.flat(_parts.trainable(parts))
  leaves = {}
  for index, (path, array) in enumerate(sorted(_parts.flat(parts.adapter).items(), key=str)):
    key = jax.random.fold_in(jax.random.key(seed), index)
    noisy = probe.add_noise(array, key, by) if flags[path] else array
    leaves[path] = jax.device_put(noisy, array.sharding)
  return parts.replace(adapter=_parts.nest(leaves))


def slots_of(parts: _parts.Parts) -> dict[tuple, tuple[str, jax.Array]]:
  """{path: (slot name, array)} of every array of the adapters."""
  return {path: (path[-1], array) for path, array in _parts.flat(parts.adapter).items()}


def assert_close(actual: Any, expected: Any, what: str, *, tolerance: float = TOLERANCE) -> None:
  """Asserts equality to a relative tolerance, of each array's largest number."""

  def one(a: Any, b: Any) -> None:
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    scale = float(np.max(np.abs(b), initial=0.0))
    chex.assert_trees_all_close(a, b, rtol=tolerance, atol=tolerance * scale)

  _explained(lambda: jax.tree.map(one, actual, expected), actual, expected, what)


def assert_equal(actual: Any, expected: Any, what: str) -> None:
  """Asserts bitwise equality."""

  def check():
    return chex.assert_trees_all_equal(actual, expected)

  _explained(check, actual, expected, what)


def _explained(check: Callable[[], Any], actual: Any, expected: Any, what: str) -> None:
  try:
    check()
  except AssertionError as error:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    off = max((distance(a, b) for a, b in pairs), default=0.0)
    raise AssertionError(f'{what}: off by {off:.2g} of the largest number') from error


def distance(a: Any, b: Any) -> float:
  """The largest difference of two arrays, relative to the largest number of the second."""
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  scale = float(np.max(np.abs(b), initial=0.0)) or 1.0
  return float(np.max(np.abs(a - b), initial=0.0)) / scale


def assert_differ(actual: Any, expected: Any, what: str, *, by: float = 1e-3) -> None:
  """Asserts that two arrays are clearly not equal."""
  off = distance(actual, expected)
  if not off >= by:
    raise AssertionError(f'{what}: they differ by {off:.2g} of the largest number')

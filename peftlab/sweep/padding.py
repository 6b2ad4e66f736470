"""Arrays of a trial padded into those of a pack and cut out again; and whether a type bears it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _parts
from peftlab.sweep import numbers as number_slots
from peftlab.train.opt_state import OptState, StepOptions, optimizer

Tree = Any

# Kernels [in, out] on which a type is tried; the first that its slots fit.
_KERNELS = ((48, 32), (64, 64), (256, 256))
_TOLERANCE = 2e-6


def pad(array: jax.Array, shape: Sequence[int]) -> jax.Array:
  """The array with zeros behind it in every dimension that is longer in `shape`."""
  if array.shape == tuple(shape):
    return array
  widths = [(0, n - m) for m, n in zip(array.shape, shape, strict=True)]
  return jnp.pad(array, widths)


def cut(array: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Inverse of `pad`."""
  return array[tuple(slice(n) for n in shape)]


def pad_tree(tree: Tree, like: Tree) -> Tree:
  """Every array of nested dicts padded to that of the same path in `like`, whose others stay."""
  own, all_ = _parts.flat(tree), _parts.flat(like)
  return _parts.nest({p: pad(own[p], a.shape) if p in own else a for p, a in all_.items()})


def cut_tree(tree: Tree, like: Tree) -> Tree:
  """Inverse of `pad_tree`, for the arrays that `like` has."""
  found = _parts.flat(tree)
  return _parts.nest({p: cut(found[p], a.shape) for p, a in _parts.flat(like).items()})


def pad_state(state: OptState, like: OptState) -> OptState:
  """An optimizer's state padded to another, whose arrays of the model's state fill the gaps."""
  inner = jax.tree.map(lambda a, b: pad(a, b.shape), state.inner, like.inner)
  filled = {**_parts.flat(like.state), **_parts.flat(state.state)}
  return dataclasses.replace(state, inner=inner, state=_parts.nest(filled))


def cut_state(state: OptState, like: OptState) -> OptState:
  """Inverse of `pad_state`."""
  inner = jax.tree.map(lambda a, b: cut(a, b.shape), state.inner, like.inner)
  found = _parts.flat(state.state)
  kept = {path: found[path] for path in _parts.flat(like.state)}
  return dataclasses.replace(state, inner=inner, state=_parts.nest(kept))


def lengths(tree: Tree, like: Tree) -> dict[str, np.ndarray]:
  """{path: its lengths int32 [dimensions]} of the arrays that are shorter than those of `like`."""
  own, whole = _parts.flat(tree), _parts.flat(like)
  return {
    _parts.path_name(path): np.array(array.shape, np.int32)
    for path, array in own.items()
    if array.shape != whole[path].shape
  }


def masked(tree: Tree, sizes: Mapping[str, jax.Array]) -> Tree:
  """Zeros beyond the `lengths` of a trial: what is padded gets no gradient."""

  def one(path: tuple, array: jax.Array) -> jax.Array:
    size = sizes.get(_parts.path_name(path))
    if size is None:
      return array
    for axis in range(array.ndim):
      places = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis)
      array = jnp.where(places < size[axis], array, jnp.zeros((), array.dtype))
    return array

  return _parts.nest({path: one(path, array) for path, array in _parts.flat(tree).items()})


def check(
  adapter: _adapter.Adapter,
  carrier: _adapter.Adapter,
  numbers: Sequence[str],
  options: StepOptions,
) -> str:
  """Why an adapter cannot run inside a carrier; '' where it can.

  The type is tried on a small kernel: padded with zeros, and with its numbers as arrays, `apply`
  must give the same output and gradient, and the optimizer the same update.

  Args:
    adapter: of a trial.
    carrier: of the pack.
    numbers: the fields that are given as arrays.
    options: of the trial's step.
  """
  kind = type(adapter).__name__
  words = [f.name for f in dataclasses.fields(carrier) if f.compare and f.name not in numbers]
  sizes = [n for n in words if getattr(adapter, n) != getattr(carrier, n)]
  if not sizes and not numbers:
    return ''
  what = ' and '.join([f'{n} {getattr(adapter, n)}' for n in (*sizes, *numbers)])
  reason = ''
  for kernel in _KERNELS:
    try:
      differs = _differs(adapter, carrier, tuple(numbers), options, kernel)
    except jax.errors.JAXTypeError as error:
      return f'for {kind}.apply reads {" or ".join(numbers)} as a Python number ({_line(error)})'
    except (ValueError, TypeError) as error:
      reason = _line(error)
      continue
    return f'for {kind} with {what} inside a larger one has another {differs}' if differs else ''
  return f'for {kind} with {what} was not run inside a larger one: {reason}'


def _line(error: Exception) -> str:
  return str(error).strip().split('\n')[0][:120].rstrip('.')


@dataclasses.dataclass
class _Base(_adapter.PlainBase):
  """A kernel whose dropout draws from one key."""

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    """x with dropout, as a layer in training does it."""
    keep = jax.random.bernoulli(jax.random.key(1), 1.0 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


def _differs(
  adapter: _adapter.Adapter,
  carrier: _adapter.Adapter,
  numbers: tuple[str, ...],
  options: StepOptions,
  kernel: tuple[int, int],
) -> str:
  """'output', 'gradient' or 'update' where that of the padded adapter is not its own."""
  own = _arrays(adapter, kernel)
  big = number_slots.numbered(carrier, numbers)
  shapes = {name: _shape(slot, carrier, kernel) for name, slot in carrier.slots().items()}
  if any(m > n for name, a in own.items() for m, n in zip(a.shape, shapes[name], strict=True)):
    raise ValueError(f'a slot of {type(adapter).__name__} is smaller where its sizes are larger.')
  padded = {name: pad(array, shapes[name]) for name, array in own.items()}
  padded |= {
    number_slots.slot(n): jnp.asarray(number_slots.value(getattr(adapter, n))) for n in numbers
  }
  small = _outcome(adapter, own, kernel)
  large = _outcome(big, padded, kernel)
  if not _near(small[0], large[0]):
    return 'output'
  grads = {name: cut(large[1][name], a.shape) for name, a in small[1].items()}
  if not all(_near(small[1][name], grads[name]) for name in grads):
    return 'gradient'
  if all(own[name].shape == shapes[name] for name in grads):
    return ''
  updated = _update(options, {n: own[n] for n in grads}, small[1])
  masked_grads = {name: pad(g, shapes[name]) for name, g in small[1].items()}
  beside = _update(options, {n: padded[n] for n in grads}, masked_grads)
  same = all(_near(pad(u, shapes[n]), beside[n]) for n, u in updated.items())
  return '' if same else f'update of {options.optimizer}'


def _shape(
  slot: _adapter.Slot, adapter: _adapter.Adapter, kernel: tuple[int, int]
) -> tuple[int, ...]:
  return _adapter.slot_shape(slot, adapter, sizes={'in': kernel[0], 'out': kernel[1]})


def _arrays(adapter: _adapter.Adapter, kernel: tuple[int, int]) -> dict[str, jax.Array]:
  """Arrays of an adapter as after some training, away from their first values."""
  key, weight = jax.random.key(0), _weight(kernel)
  made: dict[str, jax.Array] = {}
  slots = adapter.slots()
  if any(slot.init is _adapter.together for slot in slots.values()):
    made |= adapter.start(key, kernel, weight, weight)
  for i, (name, slot) in enumerate(slots.items()):
    here = jax.random.fold_in(key, i)
    if name not in made:
      given = (weight,) if slot.needs_weight else ()
      made[name] = slot.init(here, _shape(slot, adapter, kernel), slot.dtype, *given)
    if slot.trainable and jnp.issubdtype(made[name].dtype, jnp.inexact):
      made[name] += 0.1 * jax.random.normal(here, made[name].shape, made[name].dtype)
  return made


def _weight(kernel: tuple[int, int]) -> jax.Array:
  return jax.random.normal(jax.random.key(7), kernel) / np.sqrt(kernel[0]).astype(np.float32)


def _outcome(
  adapter: _adapter.Adapter, arrays: Mapping[str, jax.Array], kernel: tuple[int, int]
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """(the output, the gradient of its sum against a fixed direction) of `apply`."""
  x = jax.random.normal(jax.random.key(3), (5, kernel[0]))
  along = jax.random.normal(jax.random.key(4), (5, kernel[1]))
  trained = {
    n
    for n, s in adapter.slots().items()
    if s.trainable and jnp.issubdtype(arrays[n].dtype, jnp.inexact)
  }

  @jax.jit
  def run(moving: dict, fixed: dict) -> tuple[jax.Array, dict]:
    def total(moving: dict) -> tuple[jax.Array, jax.Array]:
      values = _adapter.Values({**moving, **fixed})
      base: Any = _Base(_weight(kernel))
      y = adapter.apply(x, base, values)
      return jnp.sum(y * along), y

    (_, y), grads = jax.value_and_grad(total, has_aux=True)(moving)
    return y, grads

  moving = {n: a for n, a in arrays.items() if n in trained}
  return run(moving, {n: a for n, a in arrays.items() if n not in trained})


def _update(options: StepOptions, arrays: dict, grads: dict) -> dict[str, jax.Array]:
  """The second update of an optimizer."""
  with jax.numpy_dtype_promotion('standard'):
    found = optimizer(options, 0.01, 0.1)
    run = jax.jit(functools.partial(_twice, found))
    return run(arrays, grads)


def _twice(found: Any, arrays: dict, grads: dict) -> dict:
  state = found.init(arrays)
  _, state = found.update(grads, state, arrays)
  return found.update(grads, state, arrays)[0]


def _near(a: jax.Array, b: jax.Array) -> bool:
  scale = max(float(jnp.max(jnp.abs(a), initial=0.0)), 1e-30)
  return a.shape == b.shape and float(jnp.max(jnp.abs(a - b), initial=0.0)) <= _TOLERANCE * scale

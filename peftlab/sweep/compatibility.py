"""Whether an adapter type computes the same inside a pack: tried on a small kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter
from peftlab.sweep import numbers as number_slots
from peftlab.sweep.padding import cut, pad
from peftlab.train.opt_state import StepOptions, optimizer

# Kernels [in, out] on which a type is tried; the first that its slots fit.
_KERNELS = ((48, 32), (64, 64), (256, 256))
_TOLERANCE = 2e-6
_STEPS = 10  # of the run in which `after_step` is tried, at its begin, middle and end
_MATTERS = ('trainable', 'shared', 'aside', 'role', 'rate', 'dtype')  # of a slot, in training


def check(
  adapter: _adapter.Adapter,
  carrier: _adapter.Adapter,
  numbers: Sequence[str],
  options: StepOptions,
) -> str:
  """Why an adapter cannot run inside a carrier; '' where it can.

  The type is tried on a small kernel, in float32: padded with zeros, and with its numbers as
  arrays, `apply` and `penalty` must give the same output and gradient, the optimizer the same
  update, and `after_step` the same arrays. Its slots must be the same but for sizes.

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
      with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
        differs = _differs(adapter, carrier, tuple(numbers), options, kernel)
    except jax.errors.JAXTypeError as error:
      return f'for {kind} reads {" or ".join(numbers)} as a Python number ({_line(error)})'
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outcome:
  """What an adapter computes in training: [5, out], and {slot: array}."""

  output: jax.Array
  gradient: dict[str, jax.Array]
  after: list[dict[str, jax.Array]]  # what `after_step` gives, at each step that is tried


def _differs(
  adapter: _adapter.Adapter,
  carrier: _adapter.Adapter,
  numbers: tuple[str, ...],
  options: StepOptions,
  kernel: tuple[int, int],
) -> str:
  """What of the padded adapter is not its own: 'output', 'gradient', ...; '' where all is."""
  own = _arrays(adapter, kernel)
  big = number_slots.numbered(carrier, numbers)
  shapes = {name: _shape(slot, carrier, kernel) for name, slot in carrier.slots().items()}
  if any(m > n for name, a in own.items() for m, n in zip(a.shape, shapes[name], strict=True)):
    raise ValueError(f'a slot of {type(adapter).__name__} is smaller where its sizes are larger.')
  if unlike := _unlike(adapter, carrier):
    return unlike
  padded: dict[str, Any] = {name: pad(array, shapes[name]) for name, array in own.items()}
  padded |= {number_slots.slot(n): number_slots.held(getattr(adapter, n)) for n in numbers}
  small, large = _outcome(adapter, own, kernel), _outcome(big, padded, kernel)
  if not _near(small.output, large.output):
    return 'output'
  if not _all_near(small.gradient, large.gradient):
    return 'gradient'
  if not all(map(_all_near, small.after, large.after)):
    return 'value after a step'
  grads = small.gradient
  if all(own[name].shape == shapes[name] for name in grads):
    return ''
  updated = _update(options, {n: own[n] for n in grads}, grads)
  masked_grads = {name: pad(g, shapes[name]) for name, g in grads.items()}
  beside = _update(options, {n: padded[n] for n in grads}, masked_grads)
  same = all(_near(pad(u, shapes[n]), beside[n]) for n, u in updated.items())
  return '' if same else f'update of {options.optimizer}'


def _unlike(adapter: _adapter.Adapter, carrier: _adapter.Adapter) -> str:
  """The first thing that a slot of the carrier has otherwise: 'rate of its slot b'."""
  theirs = carrier.slots()
  for name, slot in adapter.slots().items():
    for what in _MATTERS:
      if getattr(slot, what) != getattr(theirs[name], what):
        return f'{what} of its slot {name}'
  return ''


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
) -> _Outcome:
  """Of `apply` and `penalty`, and of `after_step`; the gradient is that of a weighted sum."""
  x = jax.random.normal(jax.random.key(3), (5, kernel[0]))
  along = jax.random.normal(jax.random.key(4), (5, kernel[1]))
  slots = adapter.slots()
  trained = {
    n for n, s in slots.items() if s.trainable and jnp.issubdtype(arrays[n].dtype, jnp.inexact)
  }

  @jax.jit
  def run(moving: dict, fixed: dict) -> tuple[jax.Array, dict, list[dict]]:
    def total(moving: dict) -> tuple[jax.Array, jax.Array]:
      every = {**moving, **fixed}
      seen = {name: array for name, array in every.items() if not slots[name].aside}
      base: Any = _Base(_weight(kernel))
      y = adapter.apply(x, base, _adapter.Values(seen))
      extra = adapter.penalty(_adapter.Values(every))
      return jnp.sum(y * along) + (0.0 if extra is None else extra), y

    (_, y), grads = jax.value_and_grad(total, has_aux=True)(moving)
    return y, grads, _after(adapter, {**moving, **fixed}, grads)

  moving = {n: a for n, a in arrays.items() if n in trained}
  y, grads, after = run(moving, {n: a for n, a in arrays.items() if n not in trained})
  return _Outcome(output=y, gradient=grads, after=after)


def _after(
  adapter: _adapter.Adapter, arrays: Mapping[str, jax.Array], grads: Mapping[str, jax.Array]
) -> list[dict[str, jax.Array]]:
  """What `after_step` gives for one kernel of one layer, at some steps of a run."""
  stacked = jax.tree.map(lambda a: a[None], (dict(arrays), dict(grads)))
  found = []
  for step in (0, _STEPS // 2, _STEPS - 1):
    given = [_adapter.Kernel(*stacked)]
    (new,) = adapter.after_step(given, step=jnp.int32(step), steps=_STEPS)
    found.append({name: array[0] for name, array in new.items()})
  return found


def _update(options: StepOptions, arrays: dict, grads: dict) -> dict[str, jax.Array]:
  """The second update of an optimizer."""
  run = jax.jit(functools.partial(_twice, optimizer(options, 0.01, 0.1)))
  return run(arrays, grads)


def _twice(found: Any, arrays: dict, grads: dict) -> dict:
  state = found.init(arrays)
  _, state = found.update(grads, state, arrays)
  return found.update(grads, state, arrays)[0]


def _all_near(small: Mapping[str, jax.Array], large: Mapping[str, jax.Array]) -> bool:
  """Whether some arrays are the leading parts of others."""
  return all(_near(array, cut(large[name], array.shape)) for name, array in small.items())


def _near(a: jax.Array, b: jax.Array) -> bool:
  scale = max(float(jnp.max(jnp.abs(a), initial=0.0)), 1e-30)
  return a.shape == b.shape and float(jnp.max(jnp.abs(a - b), initial=0.0)) <= _TOLERANCE * scale

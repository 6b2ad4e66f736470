"""Properties of slots, apply and fuse as functions, at one kernel."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter
from peftlab.testing import case as cases
from peftlab.testing import probe

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
PLAIN = (bool, int, float, str, bytes, list, dict, set, tuple)


def slots_are_stable(case: cases.Case) -> None:
  """slots() gives the same names, dims and flags at every call, and init the same values."""
  told = [_told(case.adapter.slots()) for _ in range(2)]
  assert told[0] == told[1], f'slots() changed: {told[0]}, then {told[1]}'
  _, weight = probe.inputs()
  made = [probe.slot_arrays(case.adapter, weight, jax.random.key(1)) for _ in range(2)]
  for name in made[0]:
    cases.assert_equal(made[1][name], made[0][name], f'init of {name!r}, same key')


def _told(slots: dict[str, _adapter.Slot]) -> dict[str, tuple]:
  return {
    n: (s.dims, s.needs_weight, s.trainable, s.shared, s.role, jnp.dtype(s.dtype).name)
    for n, s in slots.items()
  }


def slots_have_their_shape(case: cases.Case) -> None:
  """init gives every slot the shape of its dims and its dtype, and finite numbers."""
  x, weight = probe.inputs()
  del x
  sizes = {'in': weight.shape[0], 'out': weight.shape[1]}
  arrays = probe.slot_arrays(case.adapter, weight, jax.random.key(1))
  slots, shapes = _adapter.slots_at(case.adapter, sizes=sizes)
  for name, slot in slots.items():
    got, expected = (arrays[name].shape, arrays[name].dtype), (shapes[name], jnp.dtype(slot.dtype))
    assert got == expected, f'{name!r} starts as {got}, expected {expected}'
    assert np.isfinite(np.asarray(arrays[name], np.float32)).all(), (
      f'{name!r} starts with a number that is not finite'
    )


def every_slot_is_read(case: cases.Case) -> None:
  """apply reads every slot."""
  values = _adapter.Values(case.kernel.arrays)
  jax.eval_shape(lambda: _apply_values(case.kernel, values))
  unread = sorted(set(values) - values.read)
  assert not unread, f'apply never reads {", ".join(unread)}'


def _apply_values(kernel: probe.Probe, values: _adapter.Values) -> jax.Array:
  return kernel.adapter.apply(kernel.x, kernel.base(), values)


def keeps_shape(case: cases.Case) -> None:
  """x [..., in] becomes y [..., out] for any leading dimensions, row by row the same."""
  case.needs_weights()
  kernel = case.kernel
  y = kernel.apply()
  assert y.shape == (probe.TOKENS, probe.SIZES[1]), f'y has shape {y.shape}'
  split = kernel.apply(x=kernel.x.reshape(2, -1, probe.SIZES[0]))
  cases.assert_close(split.reshape(y.shape), y, 'x [2, 3, in] against x [6, in]')


def keeps_sequences(case: cases.Case) -> None:
  """At a point [texts, length, out] comes back as long or longer, each text as alone."""
  if not case.point:
    raise cases.NotApplicable('it does not go on points')
  kernel = case.kernel
  y = kernel.apply()
  texts, length, size = kernel.x.shape
  more = y.shape[1] - length
  assert more >= 0, f'y has shape {y.shape} for x {kernel.x.shape}'
  assert y.shape == (texts, length + more, size), f'y has shape {y.shape} for x {kernel.x.shape}'
  for text in range(texts):
    alone = kernel.apply(x=kernel.x[text : text + 1])
    cases.assert_close(alone[0], y[text], f'text {text} against itself alone')
  none = kernel.apply(x=kernel.x[:, :0])
  assert none.shape == (texts, more, size), f'y has shape {none.shape} for a text of no token'
  cases.assert_close(none, y[:, :more], 'the rows in front, of a text of no token')


def keeps_dtype(case: cases.Case) -> None:
  """y has the dtype of x: float32, bfloat16, float16. fuse stays in float32."""
  for dtype in DTYPES:
    found = jax.eval_shape(lambda dtype=dtype: case.kernel.apply(dtype)).dtype
    assert found == dtype, f'x {jnp.dtype(dtype).name} gave y {found.name}'
  if case.adapter.mergeable:
    fused = jax.eval_shape(case.kernel.fuse)
    assert fused.dtype == jnp.float32, f'fuse of float32 gave {fused.dtype.name}'
    assert fused.shape == probe.SIZES, f'fuse gave shape {fused.shape} for {probe.SIZES}'


def is_finite(case: cases.Case) -> None:
  """Outputs and gradients are finite, also for a token of zeros and in bfloat16 and float16."""
  for random in (False, True):
    kernel = probe.probe(case.adapter, random=random)
    for dtype in DTYPES if case.thorough else DTYPES[::2]:
      y, gradients = _with_gradients(case, kernel, dtype)
      for name, array in (('y', y), *gradients.items()):
        where = 'y' if name == 'y' else f'the gradient of {name}'
        what = f'{where} ({"random" if random else "fresh"}, {jnp.dtype(dtype).name})'
        assert np.isfinite(np.asarray(array, np.float32)).all(), f'{what} is not finite'


def _with_gradients(
  case: cases.Case, kernel: probe.Probe, dtype: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
  inexact = {n: a for n, a in kernel.arrays.items() if jnp.issubdtype(a.dtype, jnp.inexact)}
  rest = {n: a for n, a in kernel.arrays.items() if n not in inexact}

  def total(arrays: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = dataclasses.replace(kernel, arrays=rest | arrays).apply(dtype, x)
    return jnp.mean(jnp.square(y.astype(jnp.float32))), y

  run = case.programs.setdefault(
    ('gradients', dtype), jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
  )
  (_, y), (gradients, dx) = run(inexact, kernel.x.at[0].set(0))
  return y, gradients | {'x': dx}


def has_no_memory(case: cases.Case) -> None:
  """slots, apply and fuse change nothing outside: no field, class attribute or global."""
  kernel = dataclasses.replace(case.kernel, adapter=dataclasses.replace(case.adapter))
  before = _surroundings(kernel.adapter)
  first = kernel.apply()
  cases.assert_equal(kernel.apply(), first, 'apply called again with the same arrays')
  kernel.adapter.slots()
  if case.adapter.mergeable:
    kernel.fuse()
  after = _surroundings(kernel.adapter)
  changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
  assert not changed, f'{", ".join(changed)} changed'


def _surroundings(adapter: _adapter.Adapter) -> dict[str, str]:
  """The plain values that code of an adapter's file could write to, as text."""
  kind = type(adapter)
  fields = {f'self.{n}': repr(v) for n, v in vars(adapter).items()}
  attributes = {f'{kind.__name__}.{n}': repr(v) for n, v in vars(kind).items() if _is_plain(v)}
  module = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
  names = {n: repr(v) for n, v in module.items() if _is_plain(v) and not n.startswith('__')}
  return fields | attributes | names


def _is_plain(value: Any) -> bool:
  return isinstance(value, (*PLAIN, jax.Array))


def reads_no_initial_field(case: cases.Case) -> None:
  """Fields that feed only first values (`initial`) are not read by apply or fuse."""
  names = {f.name for f in dataclasses.fields(case.adapter) if not f.compare}
  if not names:
    raise cases.NotApplicable('it has no `initial` field')
  watched, read = _watched(case.adapter, names)
  kernel = dataclasses.replace(case.kernel, adapter=watched)
  read.clear()
  kernel.apply()
  if case.adapter.mergeable:
    kernel.fuse()
  assert not read, f'apply or fuse reads {", ".join(sorted(read))}; what it needs is a slot'
  y = case.kernel.apply()
  for changed in _variants(case.adapter, names):
    now = dataclasses.replace(case.kernel, adapter=changed).apply()
    cases.assert_equal(now, y, f'{changed} with the arrays of {case.adapter}')


def _watched(adapter: _adapter.Adapter, names: set[str]) -> tuple[_adapter.Adapter, set[str]]:
  """A copy of an adapter that notes which of some fields are read."""
  kind = type(adapter)
  read: set[str] = set()

  def note(self: Any, name: str) -> Any:
    if name in names:
      read.add(name)
    return kind.__getattribute__(self, name)

  spy: Any = type(kind.__name__, (kind,), {'__getattribute__': note, '__module__': kind.__module__})
  copy: Any = object.__new__(spy)
  for name, value in vars(adapter).items():
    object.__setattr__(copy, name, value)
  return copy, read


def _variants(adapter: _adapter.Adapter, names: set[str]) -> list[_adapter.Adapter]:
  """The adapter with each of some fields at another value, where that is a valid one."""
  found = []
  for name in sorted(names):
    value = getattr(adapter, name)
    if isinstance(value, bool):
      other = not value
    elif isinstance(value, float):
      other = 2 * value + 1
    else:
      continue
    found.append(dataclasses.replace(adapter, **{name: other}))
  return found


CLAIMS = (
  slots_are_stable,
  slots_have_their_shape,
  every_slot_is_read,
  keeps_shape,
  keeps_sequences,
  keeps_dtype,
  is_finite,
  has_no_memory,
  reads_no_initial_field,
)

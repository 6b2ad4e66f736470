"""Properties of a model with an adapter against its base: at start, switched, detached."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _attach, _parts
from peftlab.testing import case as cases

WIDE = (256, 256)  # where a small change that is there at the start is not lost in the output


def starts_as_base(case: cases.Case) -> None:
  """A fresh adapter leaves the output as it was, or says identity_at_start = False and does not."""
  if case.adapter.identity_at_start:
    what = 'a fresh adapter against the base'
    cases.assert_close(case.first_results[0], case.base_output(), what)
    return
  # At a model of usual width, at the inputs that the adapter changes most: a few vectors among many
  # random ones tell little of a change of low rank.
  base = case.base_model(WIDE)
  model, _ = _attach.attach(base, case.adapter, where=case.where, rngs=0)
  x = cases.stack_input(WIDE[0])
  y, expected = _where_they_differ(_parts.split(model), _parts.split(base), x)
  cases.assert_differ(y, expected, 'identity_at_start is False, but it starts as the base')


@jax.jit
def _where_they_differ(
  parts: _parts.Parts, base: _parts.Parts, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(output, the base's) from x [batch, embed] on towards the largest difference, at unit size."""

  def change(x: jax.Array) -> jax.Array:
    return _parts.merge(parts)(x) - _parts.merge(base)(x)

  for _ in range(1):  # a step of power iteration
    y, pull = jax.vjp(change, x)
    (x,) = pull(y)
    x = x / (jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True)) + 1e-30)
  return _parts.merge(parts)(x), _parts.merge(base)(x)


def random_differs_from_base(case: cases.Case) -> None:
  """With random values the output is another than the base's."""
  cases.assert_differ(case.results[0], case.base_output(), 'random values against the base')


@jax.jit
def _switched(parts: _parts.Parts, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(output, while disabled twice, after that and after an exception inside)."""
  model = _parts.merge(parts)
  before = model(x)
  with _attach.disabled(model):
    with _attach.disabled(model):
      pass
    inside = model(x)
  with contextlib.suppress(InterruptedError), _attach.disabled(model):
    raise InterruptedError
  return before, inside, model(x)


def disabled_is_base(case: cases.Case) -> None:
  """Switched off it is exactly the base, also nested; on again, or after an error, as before."""
  x = cases.stack_input()
  off = case.base_output()
  on, inside, after = _switched(case.random, x)
  cases.assert_equal(np.asarray(inside), np.asarray(off), 'disabled, nested, against the base')
  cases.assert_equal(np.asarray(after), np.asarray(on), 'enabled again against before')


def detach_gives_back_base(case: cases.Case) -> None:
  """Detached it is the base: same names, same count, the very same arrays."""
  base = case.base_model()
  back = _attach.detach(_parts.merge(case.random), 'default')
  before, after = _parts.split(base), _parts.split(back)
  assert after.graph == before.graph, 'the graph is another'
  for name in ('adapter', 'base', 'state'):
    old, new = _parts.flat(getattr(before, name)), _parts.flat(getattr(after, name))
    assert old.keys() == new.keys(), f'{name} has {sorted(map(str, new))}'
    copied = [_parts.path_name(p) for p in old if old[p] is not new[p]]
    assert not copied, f'{", ".join(copied)} became another array'


def keeps_activations_dtype(case: cases.Case) -> None:
  """In bfloat16 over a float32 base the carry of a scan and the output stay bfloat16."""
  dtype = jnp.bfloat16
  model, _ = _attach.attach(case.base_model(dtype=dtype), case.adapter, where=case.where)
  parts = cases.randomized(_parts.split(model))
  y = cases.forward(parts, cases.stack_input().astype(dtype))
  assert y.dtype == dtype, f'y is {y.dtype.name}'
  assert jnp.isfinite(y).all(), 'y is not finite'
  cases.assert_close(y, case.results[0], 'bfloat16 against float32', tolerance=0.1)


CLAIMS = (
  starts_as_base,
  random_differs_from_base,
  disabled_is_base,
  detach_gives_back_base,
  keeps_activations_dtype,
)

"""Properties that hold whatever runs the layers: appliers, layer layouts, seeds, names."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
from flax import nnx
import jax
import numpy as np

from peftlab import _attach, _parts, appliers
from peftlab.testing import case as cases


def same_under_every_applier(case: cases.Case) -> None:
  """Scan, sequential and full remat give equal outputs and adapter gradients."""
  y, loss, gradients = case.results
  others = (appliers.Sequential(), appliers.Scan(remat='full'))
  for applier in others if case.thorough else others[:1]:
    parts = _with_applier(case.random, applier)
    got = cases.outputs_and_gradients(parts, cases.stack_input())
    cases.assert_close(got[0], y, f'outputs of {applier} against scan')
    cases.assert_close(got[1], loss, f'loss of {applier} against scan')
    for path, gradient in gradients.items():
      what = f'{_parts.path_name(path)}: gradient of {applier} against scan'
      cases.assert_close(got[2][path], gradient, what)


def _with_applier(parts: _parts.Parts, applier: appliers.Applier) -> _parts.Parts:
  model: Any = _parts.merge(parts)
  model.applier = applier
  return _parts.split(model)


def layers_start_differently(case: cases.Case) -> None:
  """What starts random or from the kernel differs from layer to layer; random values by seed."""
  others = _parts.flat(case.other.adapter)
  found = 0
  for path, array in _parts.flat(case.fresh.adapter).items():
    slot, array = case.adapter.slots()[path[-1]], np.asarray(array)
    by_seed = not np.array_equal(others[path], array)
    if slot.shared or not (by_seed or slot.trainable) or np.unique(array).size < 3:
      continue
    found += 1
    name = _parts.path_name(path)
    assert not np.array_equal(array[0], array[1]), f'{name} starts the same in every layer'
    assert by_seed or slot.needs_weight, f'{name} starts the same for every seed'
  if not found:
    raise cases.NotApplicable('nothing starts random')


def same_seed_same_values(case: cases.Case) -> None:
  """The same seed gives the same first values, whatever the name, other sites and layer layout."""
  fresh = _parts.flat(case.fresh.adapter)
  other, _ = _attach.attach(
    case.base_model(), case.adapter, where=case.attached[1].rows[-1].path, name='other'
  )
  for path, array in _parts.flat(_parts.split(other).adapter).items():
    if case.is_shared(path):  # as large as the sites need, and of another size other numbers
      continue
    cases.assert_close(array, fresh[path], f'{_parts.path_name(path)}: other name, fewer sites')
  for path, array in _parts.flat(_parts.split(case.listed).adapter).items():
    stacked = case.in_stack(path, fresh[cases.list_path(path)])
    what = f'{_parts.path_name(path)}: list of layers against stack'
    cases.assert_close(array, stacked, what)


def base_is_shared(case: cases.Case) -> None:
  """Attached, trained and called, the model holds the very arrays of the base."""
  called = _parts.merge(_parts.split(case.listed))
  called(cases.stack_input())
  for name, before, after in (
    ('attach', case.base_model(), case.fresh),
    ('3 steps of training', case.base_model(), case.trained),
    ('a call', case.list_model(), called),
  ):
    try:
      _parts.assert_base_shared(before, after)
    except AssertionError as error:
      raise AssertionError(f'after {name}: {error}') from error


def costs_its_own_bytes(case: cases.Case) -> None:
  """Each of several adapters on one base adds exactly the bytes of its slots."""
  _, report = case.attached
  together = (case.fresh, case.other, case.random)
  grown = _parts.nbytes([p.base for p in together]) - _parts.nbytes(case.base_model())
  assert grown == 0, f'{len(together)} adapters made the base {grown} bytes larger'
  own = _parts.nbytes([p.adapter for p in together[:2]])
  assert own == 2 * report.nbytes, f'2 adapters of {report.nbytes} bytes have {own}'
  counted = sum(
    array.size * _parts.bits(array.dtype) // 8 for array in jax.tree.leaves(case.fresh.adapter)
  )
  assert counted == report.nbytes, f'the report says {report.nbytes} bytes, there are {counted}'


def compiles_once(case: cases.Case) -> None:
  """Another name, seed, value or `initial` field of the same type compiles nothing new."""
  model = _abstract(case.base_model())
  x = cases.stack_input()
  chex.clear_trace_counter()
  run = jax.jit(chex.assert_max_traces(_forward, n=1))
  first = _parts.split(_attach.attach(model, case.adapter, where=case.where)[0])
  run.trace(first, x)
  floats = {
    f.name: 2 * getattr(case.adapter, f.name)
    for f in dataclasses.fields(case.adapter)
    if not f.compare and isinstance(getattr(case.adapter, f.name), float)
  }
  changed = dataclasses.replace(case.adapter, **floats)
  for adapter, name, rngs in ((case.adapter, 'other', 5), (changed, 'third', 6)):
    run.trace(
      _parts.split(_attach.attach(model, adapter, where=case.where, name=name, rngs=rngs)[0]), x
    )
  for parts, what in ((case.fresh, 'fresh'), (case.trained, 'trained')):
    chex.assert_trees_all_equal_shapes_and_dtypes(parts.adapter, first.adapter)
    weak = [_parts.path_name(p) for p, a in _parts.flat(parts.adapter).items() if a.weak_type]
    assert not weak, f'{what} arrays {", ".join(weak)} have a weak type; give init a dtype'


def _forward(parts: _parts.Parts, x: jax.Array) -> jax.Array:
  return _parts.merge(parts)(x)


def _abstract(model: nnx.Module) -> nnx.Module:
  parts = _parts.split(model)

  def shape(a: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)

  return _parts.merge(parts.replace(base=jax.tree.map(shape, parts.base)))


CLAIMS = (
  same_under_every_applier,
  layers_start_differently,
  same_seed_same_values,
  base_is_shared,
  costs_its_own_bytes,
  compiles_once,
)

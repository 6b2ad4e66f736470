"""Properties of training: what moves, what stays, what is counted, dropout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _attach, _parts
from peftlab.testing import case as cases


def only_the_adapter_changes(case: cases.Case) -> None:
  """3 steps leave base and state bitwise as they were."""
  for name in ('base', 'state'):
    before, after = getattr(case.fresh, name), getattr(case.trained, name)
    cases.assert_equal(after, before, name)


def every_trainable_array_moves(case: cases.Case) -> None:
  """3 steps change every trainable array, in every layer."""
  flags = _parts.flat(_parts.trainable(case.fresh))
  after = _parts.flat(case.trained.adapter)
  held = _parts.variables(_parts.outline(case.fresh))
  assert any(flags.values()), 'no slot is trainable'
  for path, before in _parts.flat(case.fresh.adapter).items():
    if not flags[path]:
      continue
    layers = before.shape[0] if held[path].get_metadata().get('stack') else 1
    same = (np.asarray(before) == np.asarray(after[path])).reshape(layers, -1).all(axis=1)
    still = np.flatnonzero(same).tolist()
    assert not still, f'{_parts.path_name(path)} does not move in layers {still}'


def frozen_arrays_stay(case: cases.Case) -> None:
  """Slots with trainable=False get no gradient and do not change."""
  flags = _parts.flat(_parts.trainable(case.fresh))
  frozen = [path for path, moves in flags.items() if not moves]
  if not frozen:
    raise cases.NotApplicable('no slot is frozen')
  before, after = _parts.flat(case.fresh.adapter), _parts.flat(case.trained.adapter)
  for path in frozen:
    cases.assert_equal(after[path], before[path], _parts.path_name(path))
    gradient = case.results[2].get(path)
    assert gradient is None or not np.any(gradient), f'{_parts.path_name(path)} has a gradient'


def counts_what_it_trains(case: cases.Case) -> None:
  """The report's trainable numbers are those of the slots, times layers and sites."""
  report = case.attached[1]
  expected, shared = 0, {}
  for sizes, layers in case.kernels:
    for name, slot in case.adapter.slots().items():
      shape = _adapter.slot_shape(slot, case.adapter, sizes=sizes)
      if slot.trainable and slot.shared:
        shared[name] = tuple(map(max, shape, shared.get(name, shape)))
      elif slot.trainable:
        expected += math.prod(shape) * layers
  expected += sum(map(math.prod, shared.values()))
  flags = _parts.flat(_parts.trainable(case.fresh))
  held = sum(a.size for p, a in _parts.flat(case.fresh.adapter).items() if flags[p])
  assert report.trainable == held, f'the report says {report.trainable}, the model has {held}'
  assert held == expected, f'the model has {held}, the slots give {expected}'


def loss_falls(case: cases.Case) -> None:
  """3 steps of gradient descent lower the loss."""
  x = cases.stack_input()
  before = float(case.first_results[1])
  after = float(cases.outputs_and_gradients(case.trained, x)[1])
  assert after < before, f'the loss went from {before:.6g} to {after:.6g}'


def dropout_is_for_training(case: cases.Case) -> None:
  """Dropout: none in eval, other masks per layer and call in training; rate 0 holds no rng."""
  if not any(f.name == 'dropout' for f in dataclasses.fields(case.adapter)):
    raise cases.NotApplicable('it has no field `dropout`')
  assert not _rng_counts(case.fresh), 'it holds an rng at dropout 0'
  fields: dict[str, Any] = {'dropout': 0.5}
  adapter = dataclasses.replace(case.adapter, **fields)
  model, _ = _attach.attach(case.base_model(), adapter, where=case.where)
  parts = _parts.split(model).replace(adapter=case.random.adapter)
  x = cases.stack_input()
  model = _parts.merge(parts)
  model.eval()
  y = cases.forward(_parts.split(model), x)
  cases.assert_close(y, case.results[0], 'eval with dropout 0.5')
  model.train()
  first, second, counts = _twice(_parts.split(model), x)
  cases.assert_differ(first, case.results[0], 'training with dropout 0.5 against eval')
  cases.assert_differ(second, first, 'training, second call against the first')
  assert all(bool(jnp.all(c == 2)) for c in counts), f'2 calls counted {counts}'
  keys = [jax.random.key_data(k) for k in _rng_keys(parts)]
  same = [bool(jnp.all(k[0] == k[1])) for k in keys]
  assert keys, 'it holds no rng key at dropout 0.5'
  assert not any(same), 'two layers draw the same masks'


@jax.jit
def _twice(parts: _parts.Parts, x: jax.Array) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
  model = _parts.merge(parts)
  first, second = model(x), model(x)
  return first, second, _rng_counts(_parts.split(model))


def _rng_counts(parts: _parts.Parts) -> list[jax.Array]:
  return [a for p, a in _parts.flat(parts.state).items() if p[-1] == 'rng_count']


def _rng_keys(parts: _parts.Parts) -> list[jax.Array]:
  return [a for p, a in _parts.flat(parts.state).items() if p[-1] == 'rng_key']


CLAIMS = (
  only_the_adapter_changes,
  every_trainable_array_moves,
  frozen_arrays_stay,
  counts_what_it_trains,
  loss_falls,
  dropout_is_for_training,
)

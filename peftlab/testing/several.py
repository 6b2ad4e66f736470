"""Properties of several adapters on one model: side by side, switched by name, summed."""

from __future__ import annotations

import functools

from flax import nnx
import jax

from peftlab import _attach, _parts
from peftlab.testing import case as cases


class OneLayer(nnx.Module):
  """One linear layer: what adapters add to its output can be summed."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.linear = nnx.Linear(12, 20, bias_init=nnx.initializers.normal(0.5), rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, 12] -> [batch, 20]."""
    return self.linear(x)


def _model(case: cases.Case) -> nnx.Module:
  return case.list_model() if case.point else OneLayer()


def _two(case: cases.Case) -> _parts.Parts:
  model = _model(case)
  for seed, name in enumerate(('first', 'second')):
    model, _ = _attach.attach(model, case.adapter, where=case.where, name=name, rngs=seed)
  return cases.randomized(_parts.split(model))


@functools.partial(jax.jit, static_argnames='sets')
def _outputs(
  parts: _parts.Parts, x: jax.Array, sets: tuple[tuple[str, ...], ...]
) -> list[jax.Array]:
  """The outputs with each set of adapters active."""
  model = _parts.merge(parts)
  found = []
  for names in sets:
    _attach.activate(model, *names)
    found.append(model(x))
  return found


def _x(case: cases.Case) -> jax.Array:
  return cases.stack_input() if case.point else cases.stack_input(12)


def deltas_add_up(case: cases.Case) -> None:
  """What two active adapters add is the sum of what each adds alone; the order says nothing."""
  case.needs_weights()  # at a point one sees what the other made
  sets = ((), ('first',), ('second',), ('first', 'second'), ('second', 'first'))
  base, first, second, both, swapped = _outputs(_two(case), _x(case), sets)
  cases.assert_close(both - base, (first - base) + (second - base), 'both against the sum')
  cases.assert_equal(swapped, both, 'the other order')


def adding_leaves_the_others(case: cases.Case) -> None:
  """Another adapter leaves arrays and output of those before it, and does not nest."""
  alone = _model(case)
  alone, _ = _attach.attach(alone, case.adapter, where=case.where, name='first')
  parts = cases.randomized(_parts.split(alone))
  before = _outputs(parts, _x(case), (('first',),))[0]
  more, _ = _attach.attach(
    _parts.merge(parts), case.adapter, where=case.where, name='second', rngs=1
  )
  after = _parts.split(more)
  for path, array in _parts.flat(parts.adapter).items():
    kept = _parts.flat(after.adapter)[path]
    assert kept is array, f'{_parts.path_name(path)} became another array'
  cases.assert_equal(_outputs(after, _x(case), (('first',),))[0], before, 'output of the first')
  places = {path[:-1] for path in _parts.flat(after.adapter)}
  first = {path[:-1] for path in _parts.flat(parts.adapter)}
  expected = first | {(*path[:-1], 1) for path in first}
  assert places == expected, f'the adapters lie at {places}'


def a_taken_name_is_refused(case: cases.Case) -> None:
  """A second adapter of the same name at the same layer is refused, and nothing changes."""
  model, _ = _attach.attach(_model(case), case.adapter, where=case.where, name='first')
  before = _parts.split(model)
  message = ''
  try:
    _attach.attach(model, case.adapter, where=case.where, name='first')
  except ValueError as error:
    message = str(error)
  assert message, 'attached twice under one name'
  assert 'first' in message, f'the message does not name it: {message}'
  assert _parts.split(model).graph == before.graph, 'the model changed'


def detaching_one_leaves_the_others(case: cases.Case) -> None:
  """Detaching one of two leaves the other as it was; detaching both leaves the base."""
  parts = _two(case)
  expected = _outputs(parts, _x(case), (('second',),))[0]
  left = _attach.detach(_parts.merge(parts), 'first')
  assert _attach.names(left) == ('second',), f'left are {_attach.names(left)}'
  got = _outputs(_parts.split(left), _x(case), (('second',),))[0]
  cases.assert_equal(got, expected, 'the other adapter alone')
  bare = _attach.detach(left, 'second')
  assert _parts.split(bare).graph == _parts.split(_model(case)).graph, 'it is not the base'


CLAIMS = (
  deltas_add_up,
  adding_leaves_the_others,
  a_taken_name_is_refused,
  detaching_one_leaves_the_others,
)

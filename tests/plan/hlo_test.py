"""Programs are read from their text: loops, matrix products, bytes, collectives; by hand."""

import jax
import jax.numpy as jnp
import pytest

from peftlab.plan import costs, flops, hlo, loops, traffic
from tests.plan import programs


@pytest.fixture(scope='module')
def module():
  return hlo.parse(programs.LOOP)


def test_arrays_of_a_tuple_and_where_they_lie():
  found = hlo.arrays('(bf16[2,4]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[3]{0}, pred[])')
  assert [(a.dtype, a.shape, a.in_hbm) for a in found] == [
    ('bf16', (2, 4), False),
    ('s4', (3,), True),
    ('pred', (), True),
  ]
  assert [a.nbytes for a in found] == [16, 2, 1]


def test_a_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match='no ENTRY'):
    hlo.parse('HloModule nothing')


def test_trips_follow_from_start_step_and_condition(module):
  loop = module.entry.instructions['while.1']
  assert loops.trips(module, loop, module.entry) == 4


@pytest.mark.parametrize(
  ('start', 'step', 'direction', 'last', 'trips'),
  ((0, 1, 'LT', 7, 7), (2, 3, 'LE', 11, 4), (9, -2, 'GT', 0, 5), (0, 1, 'NE', 3, 3)),
)
def test_trips_of_other_loops(start, step, direction, last, trips):
  text = programs.LOOP.replace(
    '%start = s32[]{:T(128)} constant(0)', f'%start = s32[] constant({start})'
  )
  text = text.replace('%one = s32[]{:T(128)} constant(1)', f'%one = s32[] constant({step})')
  text = text.replace('constant(4)', f'constant({last})').replace(
    'direction=LT', f'direction={direction}'
  )
  module = hlo.parse(text)
  assert loops.trips(module, module.entry.instructions['while.1'], module.entry) == trips


def test_a_loop_whose_end_is_data_has_no_trips():
  text = programs.LOOP.replace('%start = s32[]{:T(128)} constant(0)', '%start = s32[] parameter(2)')
  module = hlo.parse(text)
  found = costs.costs(module, 16)
  assert found.loops == {'while.1': None}
  assert found.flops == 2 * 512 * 256 * 512  # counted once


@pytest.mark.parametrize(('result', 'operands', 'attributes', 'expected'), programs.PRODUCTS)
def test_flops_of_products(result, operands, attributes, expected):
  shapes = [hlo.arrays(text)[0] for text in operands]
  line = hlo.Instruction('p', 'convolution', hlo.arrays(result), ('a', 'b'), attributes)
  assert flops.product_flops(line, shapes) == expected


def test_costs_are_those_of_the_body_times_its_trips(module):
  found = costs.costs(module, 16)
  assert found.loops == {'while.1': 4}
  assert found.flops == 4 * 2 * 512 * 256 * 512
  assert found.cycles == 4 * 1152
  assert found.other_cycles == 4 * 2200
  assert found.unknown == {}


def test_bytes_of_slices_and_updates_are_those_of_what_moves(module):
  found = costs.costs(module, 16)
  # A kernel's slice is read, the product written in place; the rest lies in the core.
  assert found.product_bytes == 4 * 512 * 512 * 2
  assert found.other_bytes == 4 * 32 * 512 * 2 + 512 * 256 * 2


def test_a_gather_sends_all_but_its_own_part(module):
  (moved,) = costs.costs(module, 16).moved
  assert (moved.kind, moved.group, moved.count, moved.hidden) == ('all-gather', 8, 4, 0)
  assert moved.array == 'bf16[256,512]'
  assert moved.payload == 4 * 256 * 512 * 2
  assert moved.sent == moved.payload * 7 / 8


@pytest.mark.parametrize(
  ('text', 'group'),
  (
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", 8),
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
    ('replica_groups=[2,4]<=[8]', 4),
    ('replica_groups={{0,1,2},{3,4,5}}, to_apply=%add', 3),
    ('channel_id=1', 16),
  ),
)
def test_groups_of_a_collective(text, group):
  line = f'  %r = f32[8]{{0}} all-reduce-start(%a), {text}'
  body = f'ENTRY %m (a: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n{line}\n}}'
  entry = hlo.parse(body).entry
  found = traffic.collective(entry, entry.instructions['r'], 16)
  assert (found.group, found.payload, found.hidden) == (group, 32, True)
  assert found.sent == 2 * 32 * (group - 1) / group


def test_flops_of_a_scan_on_cpu_are_those_counted_by_hand():
  def step(x, kernels):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, kernels)

  x, kernels = jnp.zeros((6, 8)), jnp.zeros((5, 8, 8))
  text = jax.jit(step).lower(x, kernels).compile().as_text()
  found = costs.costs(hlo.parse(text))
  assert list(found.loops.values()) == [5]
  assert found.flops == 5 * 2 * 6 * 8 * 8

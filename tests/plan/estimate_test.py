"""Time, advice and tables from costs that are given: no compiler is asked."""

import dataclasses

import pytest

from peftlab import _specs
from peftlab.plan import advice, costs, estimate, planning, program, report, topology
from peftlab.plan.chips import CHIPS
from peftlab.plugins.lora import LoRA
from peftlab.train import config

V6E = CHIPS['v6e']
GIB = 2**30


def moved(sent=0.0, hidden=0.0):
  return costs.Moved(
    kind='all-gather', group=8, count=3, payload=int(sent), sent=sent, hidden=hidden
  )


def plan(found=None, memory=None, **changes):
  experiment = config.Experiment(
    name='run',
    base=config.BaseConfig(source='llama3-8b', dtype='bfloat16'),
    mesh=config.MeshConfig(fsdp=8),
    adapter=LoRA(rank=8),
    data=config.DataConfig(batch=8, length=2048),
  )
  found = costs.Costs(flops=10**12, cycles=2 * 10**6) if found is None else found
  memory = memory or program.Memory(arguments=2 * GIB, temporaries=8 * GIB, total=10 * GIB)
  options = {
    'topology': 'v6e:2x4',
    'chip': V6E,
    'there': 8,
    'used': 8,
    'mesh': {'fsdp': 8},
    'experiment': experiment,
    'trials': 1,
    'held': {'base': GIB, 'adapter': 2**20, 'optimizer': 2**21, 'batch': 2**12},
    'memory': memory,
    'costs': found if memory.fits else None,
    'time': estimate.time_of(found, V6E) if memory.fits else None,
    'dropped': (),
    'trainable': 1234,
    'compile_seconds': 1.0,
  }
  return planning.Plan(**(options | changes))


def test_figures_of_chips_are_the_published_ones():
  # Per chip: GiB, GB/s, Tflop/s bfloat16, GB/s of the interconnect both ways.
  published = {
    'v5e': (16, 819, 197, 400),
    'v5p': (95, 2765, 459, 1200),
    'v6e': (32, 1638, 918, 800),
    'tpu7x': (192, 7380, 2307, 1200),
  }
  for name, figures in published.items():
    chip = CHIPS[name]
    found = (chip.hbm / GIB, chip.bandwidth / 1e9, chip.peak / 1e12, 2 * chip.send / 1e9)
    assert [x * chip.per_chip for x in found] == pytest.approx(figures)
  # Clocks that Google gives or that follow from its peaks, GHz.
  assert {n: round(c.clock / 1e9, 2) for n, c in CHIPS.items()} == {
    'v5e': 1.5,
    'v5p': 1.75,
    'v6e': 1.75,
    'tpu7x': 2.2,
  }


def test_the_bound_is_the_slowest_resource():
  found = costs.Costs(flops=918 * 10**9, cycles=10**7, other_bytes=3276 * 10**6)
  bound = estimate.time_of(found, V6E).bound
  assert (bound.compute, bound.memory, bound.network) == pytest.approx((1e-3, 2e-3, 0))
  assert bound.by == 'main memory'


def test_the_estimate_adds_products_other_operations_and_what_waits():
  cycles = int(V6E.clock * 2e-3)
  found = costs.Costs(
    flops=918 * 10**9,
    cycles=cycles,
    other_cycles=2 * cycles,
    other_bytes=1638 * 10**6,
    moved=(moved(sent=500e6, hidden=300e6),),
  )
  time = estimate.time_of(found, V6E)
  # 2 ms of products, 1 ms of other bytes, 200 MB through two ports of 100 GB/s.
  assert time.seconds == pytest.approx(2e-3 + 1e-3 + 1e-3)
  assert time.most == pytest.approx(2e-3 + 4e-3 + 1e-3)


@pytest.mark.parametrize(
  ('changes', 'why'),
  (
    ({'loops': {'while.1': None}}, 'how often while.1 runs'),
    ({'unknown': {'tpu_custom_call': 3}}, 'no figure for 3 x tpu_custom_call'),
    ({'cycles': 10}, 'below what the matrix units can do'),
  ),
)
def test_what_cannot_be_trusted_gives_the_roofline_alone(changes, why):
  found = costs.Costs(flops=10**12, cycles=2 * 10**6)
  made = plan(dataclasses.replace(found, **changes))
  assert made.time.seconds is None
  text = report.text(made)
  assert why in text
  assert 'the roofline alone' in text
  assert report.step_time(made).startswith('> ')


def test_a_plan_that_fits_says_so():
  text = report.text(plan(costs.Costs(flops=10**12, cycles=2 * 10**6, moved=(moved(1e9),))))
  assert 'run on v6e:2x4: 8 of 8 chips (fsdp 8)' in text
  assert '31% of 32.0 GiB: it fits' in text
  assert 'all-gather' in text


def test_a_plan_that_does_not_fit_says_what_to_change():
  memory = program.Memory(total=40 * GIB, limit=int(31.25 * GIB))
  made = plan(memory=memory, there=16, trials=4, held={'base': 16 * GIB})
  lines = advice.advice(made)
  assert '128% of 31.2 GiB: IT DOES NOT FIT' in report.text(made)
  for word in ('--pack', 'mesh.fsdp=-1', 'base.quant=nf4', 'base.remat=full'):
    assert any(word in line for line in lines), word


def test_what_does_not_divide_is_told_with_its_bytes():
  dropped = _specs.Dropped('layers.attn.k.kernel', 2, 4, 'tensor', 8, 1000)
  made = plan(dropped=(dropped,))
  assert "axis 'tensor' (8) does not divide dimension 2 (4); +1,000 bytes" in report.text(made)
  assert any('mesh.tensor=8' in line for line in advice.advice(made))


@pytest.mark.parametrize(
  'message',
  (
    'RESOURCE_EXHAUSTED: E1000: the total memory required (29.80G) exceeds available HBM (15.75G)',
    'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 29.80G of 15.75G hbm.',
  ),
)
def test_a_refusal_of_the_compiler_is_read(message):
  found = program.refused(message)
  assert (found.total, found.limit) == (int(29.8 * GIB), int(15.75 * GIB))
  assert not found.fits
  assert program.refused('INTERNAL: something else') is None


@pytest.mark.parametrize(
  ('name', 'message'),
  (
    ('v6e', "is 'v6e'; expected CHIP:SHAPE"),
    ('v6:2x4', "No chip 'v6'; did you mean 'v6e'"),
    ('v6e:2x4x1', 'a shape of v6e has 2 sizes'),
    ('v5p:2x2', 'a shape of v5p has 3 sizes'),
    ('v5e:0x4', 'sizes of at least 1'),
  ),
)
def test_a_wrong_topology_is_refused(name, message):
  with pytest.raises(ValueError, match=message):
    topology.devices(name)


def test_a_missing_compiler_is_named(monkeypatch):
  monkeypatch.setattr(topology.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"libtpu, the TPU compiler, is not installed\. .*'tpu'"):
    topology.devices('v6e:2x4')


def test_the_largest_pack_is_found_by_what_two_programs_need():
  def packed(size):
    total = (4 + 3 * size) * GIB
    fits = total <= 31 * GIB
    return plan(memory=program.Memory(total=total, limit=None if fits else 31 * GIB), trials=size)

  from peftlab.plan import sweep

  assert sweep.largest(packed, 16) == 9
  assert sweep.largest(packed, 4) == 4

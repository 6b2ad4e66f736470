"""Steps compiled by the TPU compiler: loops against unrolled layers, against flops by hand."""

import pytest

from peftlab import cli
from peftlab.plan import planning
from tests.plan import tpu

pytestmark = tpu.needs_libtpu


@pytest.fixture(scope='module')
def plans(tmp_path_factory):
  """{(applier, layers): plan} on one chip."""
  root = tmp_path_factory.mktemp('bases')
  found = {}
  for applier, layers in (('scan', 4), ('sequential', 2), ('sequential', 4)):
    source = tpu.folder(root / str(layers), layers)
    made = planning.plan(tpu.experiment(source, applier=applier), tpu.TOPOLOGY)
    found[applier, layers] = made
  return found


def test_a_loop_costs_what_its_unrolled_layers_cost(plans):
  loop, unrolled = plans['scan', 4], plans['sequential', 4]
  assert sorted(loop.costs.loops.values()) == [4, 4]
  assert unrolled.costs.loops == {}
  saved = tpu.flops(4) - tpu.flops(4, unrolled=True)
  assert loop.costs.flops - unrolled.costs.flops == pytest.approx(saved, rel=0.1)
  assert loop.time.products == pytest.approx(unrolled.time.products, rel=0.25)


def test_two_more_layers_cost_two_layers(plans):
  two, four = plans['sequential', 2], plans['sequential', 4]
  layers = tpu.flops(4) - tpu.flops(2)
  assert four.costs.flops - two.costs.flops == pytest.approx(layers, rel=0.01)


@pytest.mark.parametrize('key', (('scan', 4), ('sequential', 2), ('sequential', 4)))
def test_flops_are_those_counted_by_hand(plans, key):
  applier, layers = key
  expected = tpu.flops(layers, unrolled=applier == 'sequential')
  assert plans[key].costs.flops == pytest.approx(expected, rel=0.01)


def test_memory_holds_the_arguments(plans):
  made = plans['scan', 4]
  held = sum(made.held.values())
  assert made.fits
  assert held <= made.memory.arguments <= 1.2 * held
  assert made.memory.total < made.chip.hbm


@pytest.fixture(scope='module')
def meshed(tmp_path_factory):
  """Two layers over 4 chips."""
  source = tpu.folder(tmp_path_factory.mktemp('bases') / '2', 2)
  return planning.plan(tpu.experiment(source, fsdp=4), tpu.TOPOLOGY)


def test_a_chip_holds_the_bytes_counted_by_hand(meshed):
  split = 2 * tpu.kernels() + 512 * 256  # two layers and the embedding, bfloat16, over 4 chips
  whole = 2 * (2 * 256) + 256  # norms, on each chip
  frequencies = 2 * 32 * 4  # of rope, float32
  assert meshed.held['base'] == 2 * split // 4 + 2 * whole + frequencies
  factors, scales = 2 * 8 * (256 + 256) * 4 // 4, 2 * 4
  assert meshed.held['adapter'] == factors + scales
  assert meshed.trainable == 2 * 8 * (256 + 256)
  assert meshed.held['batch'] == 5 * 4 * 256 * 4 // 4


def test_collectives_are_those_counted_by_hand(meshed):
  """Every kernel is gathered forward and again backward, the head once for all of the loss."""
  (gathers,) = (kind for kind in meshed.costs.kinds if kind.kind == 'all-gather')
  expected = 2 * (2 * 2 * tpu.kernels() + 512 * 256)
  assert expected <= gathers.payload <= 1.1 * expected  # more: factors, tokens, a kernel or two
  assert gathers.sent == pytest.approx(gathers.payload * 3 / 4)  # a ring of 4
  reduced = sum(kind.payload for kind in meshed.costs.kinds if kind.kind == 'all-reduce')
  assert reduced <= 2 * 4 * 8 * (256 + 256)  # gradients of the factors alone, no kernel's


def test_the_command_plans_a_mesh(tmp_path, capsys):
  source = tpu.folder(tmp_path / 'base', 2)
  file = tmp_path / 'small.py'
  file.write_text(
    'from tests.plan import tpu\n'
    f'def get_config():\n  return tpu.experiment({source!r}, fsdp=2, tensor=2)\n'
  )
  code = cli.main(['plan', f'--config={file}', f'--topology={tpu.TOPOLOGY}'])
  text = capsys.readouterr().out
  assert code == 0
  assert '4 of 4 chips (fsdp 2 x tensor 2)' in text
  assert 'it fits' in text
  assert 'all-gather' in text

"""The report of attach: its numbers by hand, its table as text."""

import pytest

import peftlab
from peftlab import _specs, testing
from peftlab.plugins.lora import LoRA

pytestmark = pytest.mark.usefixtures('quick_compiles')


def test_the_numbers_of_a_report():
  """Kernels 16 x 24 and 24 x 16 in 2 layers; rank 2; only `up` is adapted."""
  _, report = peftlab.attach(testing.StackModel(), LoRA(rank=2), where='up', name='tuned')
  (row,) = report.rows
  assert (row.path, row.layers, row.kernel, row.spec) == ('layers.up', 2, (16, 24), '-')
  assert row.slots == {'a': (2, 16, 2), 'b': (2, 2, 24), 'scale': (2,)}
  assert row.parameters == report.trainable == 2 * 2 * (16 + 24)
  assert report.total == 2 * 2 * 16 * 24
  assert report.coverage == 0.5
  assert report.missed == ('layers.down',)
  assert report.nbytes == 4 * (2 * 2 * (16 + 24) + 2)
  assert (report.name, report.adapter, report.dropped) == ('tuned', LoRA(rank=2), ())


def test_the_table_is_straight_and_says_what_was_left_out():
  _, report = peftlab.attach(testing.StackModel(), LoRA(rank=2), where='up')
  assert str(report) == report.table()
  assert report.table().splitlines() == [
    'layer      layers  kernel   spec  slots                             parameters',
    'layers.up  2       16 x 24  -     a[2, 16, 2] b[2, 2, 24] scale[2]  160',
    f'default: {LoRA(rank=2)}: 160 trainable, 648 bytes, 50.0 % of 1,536 linear weights',
    'not adapted: layers.down',
  ]


def test_the_table_names_every_dropped_axis():
  """b [2, 2, 22] over tensor 2 x fsdp 4 keeps tensor: 176 / 2 bytes per device, not 176 / 8."""
  mesh = testing.meshes()['fsdp4_tensor2']
  placed, _ = _specs.place(testing.StackModel((16, 22)), mesh)
  _, report = peftlab.attach(placed, LoRA(rank=2), where='up')
  last = report.table().splitlines()[-1]
  assert last.startswith("dropped: layers.up.adapters.default.b: axis 'fsdp' (4) does not divide ")
  (dropped,) = report.dropped
  assert (dropped.size, dropped.axis_size) == (22, 4)


def test_an_embedding_counts_as_adapted_but_not_as_linear():
  _, report = peftlab.attach(testing.ZooModel(), LoRA(rank=2), where='embed')
  assert (report.coverage, report.trainable) == (0.0, 2 * (11 + 15))
  assert report.missed == ('conv', 'einsum', 'general', 'head', 'linear')

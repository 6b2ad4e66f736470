"""The table of families in docs/models.md tells what tests hold, no more and no less."""

import pathlib

from peftlab.formats.hf_weights import HfWeights
from tests.models import coverage_test, families_test, goldens, load_test, write_test
from tests.models import family_cases as cases

DOCUMENT = pathlib.Path(__file__).parents[2] / 'docs' / 'models.md'


def names(test):
  """The goldens that a test is made of: its parameter 'name'."""
  for mark in test.pytestmark:
    if mark.name == 'parametrize' and mark.args[0] == 'name':
      return set(mark.args[1])
  raise AssertionError(f'{test.__name__} has no parameter name.')


SCAN = names(families_test.test_logits_equal_transformers) | names(
  load_test.test_logits_equal_transformers
)
SEQUENTIAL = names(families_test.test_sequential_equals_transformers)
PIPELINE = names(families_test.test_a_pipeline_equals_transformers)
CACHE = names(families_test.test_decoding_with_a_cache_equals_transformers)
COLUMNS = {
  'logits': SCAN | SEQUENTIAL | PIPELINE | CACHE,
  'scan': SCAN,
  'sequential': SEQUENTIAL,
  'pipeline': PIPELINE,
  'cache': CACHE,
  'LoRA': names(coverage_test.test_expected_equals_matched),
  'experts': names(families_test.test_adapters_of_experts_are_a_change_of_each_kernel),
  'HF in': SCAN | SEQUENTIAL | PIPELINE | CACHE,
  'HF out': names(write_test.test_what_was_loaded_is_written_bit_by_bit),
}


def cell(family, column):
  held = set(cases.FAMILIES[family])
  tensors = [tensor for name in held for tensor in HfWeights(goldens.HF / name)]
  if column == 'experts' and not any('.experts.' in tensor for tensor in tensors):
    return '-'
  return str(len(held & COLUMNS[column]))


def test_the_table_is_what_tests_hold():
  rows = [
    f'| `{family}` | ' + ' | '.join(cell(family, column) for column in COLUMNS) + ' |'
    for family in cases.FAMILIES
  ]
  header = '| family | ' + ' | '.join(COLUMNS) + ' |'
  table = '\n'.join([header, '| --- ' * (len(COLUMNS) + 1) + '|', *rows]) + '\n'
  assert table in DOCUMENT.read_text(), f'docs/models.md should have:\n{table}'


def test_no_cell_is_empty():
  for family in cases.FAMILIES:
    for column in COLUMNS:
      assert cell(family, column) != '0', (family, column)

"""The iterator: all rows once an epoch, and resumed is bitwise uninterrupted."""

import json
import subprocess
import sys

import numpy as np
import pytest

from peftlab.data.batches import Batches, held_out_batches
from peftlab.data.corpora import Corpus, load_corpus
from peftlab.data.packing import pack
from peftlab.data.tokenizers import load_tokenizer

SMOLLM2 = load_tokenizer('smollm2')
GSM8K = load_corpus('gsm8k')


def _rows(first=0, count=20, **options):
  options = {'objective': 'pretrain', 'length': 48} | options
  part = Corpus(name='gsm8k', examples=GSM8K.examples[first : first + count], separator='\n')
  return pack(part, SMOLLM2, **options)[0]


ROWS = _rows()


def _assert_same(left, right):
  assert left.keys() == right.keys()
  for name in left:
    assert left[name].tobytes() == right[name].tobytes()


def test_every_epoch_has_every_row_once_in_its_own_order():
  batches = Batches(ROWS, size=5, seed=3)
  taken = np.concatenate([batches.indices(step) for step in range(3 * len(ROWS))])
  epochs = taken[: len(taken) // len(ROWS) * len(ROWS)].reshape(-1, len(ROWS))
  assert len(epochs) == 15
  assert all(sorted(epoch) == list(range(len(ROWS))) for epoch in epochs.tolist())
  assert len({tuple(epoch) for epoch in epochs.tolist()}) == 15


def test_another_seed_is_another_order_and_no_shuffle_is_the_corpus_order():
  orders = [Batches(ROWS, size=len(ROWS), seed=seed).indices(0).tolist() for seed in (0, 1)]
  assert orders[0] != orders[1]
  plain = Batches(ROWS, size=4, shuffle=False)
  assert plain.indices(1).tolist() == [4, 5, 6, 7]


def test_a_batch_larger_than_the_corpus_goes_through_it_again():
  batches = Batches(ROWS, size=2 * len(ROWS) + 1)
  assert next(batches)['tokens'].shape == (2 * len(ROWS) + 1, 48)


@pytest.mark.parametrize('at', (0, 1, 7, 40))
def test_a_restored_iterator_goes_on_bitwise(at):
  whole = Batches(ROWS, size=3, seed=5)
  expected = [next(whole) for _ in range(at + 4)][at:]
  interrupted = Batches(ROWS, size=3, seed=5)
  for _ in range(at):
    next(interrupted)
  state = json.loads(json.dumps(interrupted.state()))
  resumed = Batches(_rows(), size=3, seed=5)
  resumed.restore(state)
  for batch in expected:
    _assert_same(next(resumed), batch)
  assert resumed.state() == whole.state()


def test_the_position_is_the_same_in_another_process():
  batches = Batches(ROWS, size=3, seed=9)
  script = (
    'import sys, runpy; t = runpy.run_path(sys.argv[1]);'
    "b = t['Batches'](t['ROWS'], size=3, seed=9);"
    'print(b.rows.fingerprint, b.indices(17).tolist())'
  )
  done = subprocess.run(
    [sys.executable, '-c', script, __file__], capture_output=True, text=True, check=True
  )
  assert done.stdout.split('\n')[0] == f'{batches.rows.fingerprint} {batches.indices(17).tolist()}'


@pytest.mark.parametrize(
  ('other', 'message'),
  (
    (Batches(_rows(first=20), size=3), 'was saved with fingerprint .*other text'),
    (Batches(_rows(length=50), size=3), 'was saved with length 48; this run has 50'),
    (Batches(ROWS, size=4), 'was saved with size 3; this run has 4'),
    (Batches(ROWS, size=3, seed=1), 'was saved with seed 0; this run has 1'),
    (Batches(ROWS, size=3, shuffle=False), 'was saved with shuffle True; this run has False'),
    (
      Batches(_rows(objective='sft', length=300), size=3),
      "was saved with objective 'pretrain'; this run has 'sft'",
    ),
    (
      Batches(pack(GSM8K, load_tokenizer('glassllm'), objective='pretrain', length=48)[0], size=3),
      "was saved with tokenizer 'smollm2'; this run has 'glassllm:en'",
    ),
  ),
)
def test_a_foreign_position_is_refused_by_name(other, message):
  state = Batches(ROWS, size=3).state() | {'step': 12}
  with pytest.raises(ValueError, match=message):
    other.restore(state)
  assert other.step == 0


@pytest.mark.parametrize('change', ({'step': -1}, {'step': '3'}, {'steps': 3}))
def test_a_damaged_position_is_refused(change):
  batches = Batches(ROWS, size=3)
  with pytest.raises(
    ValueError, match=r'A data position with .* cannot be restored; expected step'
  ):
    batches.restore(batches.state() | change)


def test_held_out_batches_have_each_row_once():
  batches = held_out_batches(ROWS, size=4)
  assert all(batch['tokens'].shape == (4, 48) for batch in batches)
  rows = [row.tobytes() for batch in batches for row in batch['tokens']]
  assert rows[: len(ROWS)] == [row.tobytes() for row in ROWS.batch(range(len(ROWS)))['tokens']]
  filled = np.concatenate([batch['segment_ids'].any(axis=1) for batch in batches])
  assert filled.sum() == len(ROWS)
  assert sum(batch['loss_mask'].sum() for batch in batches) == ROWS.predicted.sum()


def test_fewer_held_out_rows_are_spread_over_all_rows():
  batches = held_out_batches(ROWS, size=2, count=6)
  assert len(batches) == 3
  all_rows = [row.tobytes() for row in ROWS.batch(range(len(ROWS)))['tokens']]
  places = [all_rows.index(row.tobytes()) for batch in batches for row in batch['tokens']]
  assert places[0] == 0
  assert places[-1] == len(ROWS) - 1
  assert len(set(places)) == 6


@pytest.mark.parametrize('count', (None, 5))
def test_the_held_out_rows_do_not_depend_on_the_size_of_a_batch(count):
  def rows(size):
    batches = held_out_batches(ROWS, size=size, count=count)
    pairs = [pair for b in batches for pair in zip(b['tokens'], b['segment_ids'], strict=True)]
    return [tokens.tobytes() for tokens, segments in pairs if segments.any()]

  assert len(rows(1)) == (count or len(ROWS))
  for size in (2, 3, 7, 100):
    assert rows(size) == rows(1)


def test_impossible_sizes_are_refused():
  for options in ({'size': 0}, {'size': 2, 'count': 0}):
    with pytest.raises(ValueError, match=r'held-out rows in batches of \d; expected 1 or more'):
      held_out_batches(ROWS, **options)
  with pytest.raises(ValueError, match='Batches of size None'):
    Batches(ROWS, size=None)
  with pytest.raises(ValueError, match='Batches of size 0 with seed 0; expected 1 or more'):
    Batches(ROWS, size=0)

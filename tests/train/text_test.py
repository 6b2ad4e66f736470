"""The text of a run: the held-out part does not depend on the batch, and no batch repeats a row."""

import dataclasses
import json
import types

import pytest

from peftlab.train import config, text

LINES = [{'text': f'there is a bird number {n}, and it sings for {2 * n} days.'} for n in range(60)]


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  path = tmp_path_factory.mktemp('text') / 'birds.jsonl'
  path.write_text('\n'.join(map(json.dumps, LINES)))
  return str(path)


def load(corpus, **data):
  data = {'length': 16, 'batch': 2, 'eval_rows': 5, 'held_out': 0.5} | data
  experiment = config.Experiment(
    base=config.BaseConfig(source='package:glassllm/en'),
    data=config.DataConfig(corpus=corpus, **data),
    train=config.TrainConfig(samples=0),
  )
  return text.load_text(experiment, say=lambda line: None)


def rows(found):
  """The tokens of every held-out row that is not empty."""
  pairs = [p for b in found.held_out for p in zip(b['tokens'], b['segment_ids'], strict=True)]
  return [tokens.tobytes() for tokens, segments in pairs if segments.any()]


def test_the_held_out_rows_are_as_many_as_asked_for_whatever_the_batch(corpus):
  expected = rows(load(corpus))
  assert len(expected) == 5
  for batch in (1, 3, 8):
    assert rows(load(corpus, batch=batch)) == expected


def test_all_held_out_rows_are_taken_where_0_are_asked_for(corpus):
  assert rows(load(corpus, eval_rows=0)) == rows(load(corpus, eval_rows=10_000, batch=7))
  assert len(rows(load(corpus, eval_rows=0))) > 5


def test_a_batch_of_more_rows_than_there_are_is_refused(corpus):
  count = len(load(corpus).rows)
  load(corpus, batch=count)
  for batch, limit in ((count + 1, 0), (4, 3)):
    there = limit or count
    with pytest.raises(ValueError, match=rf'data.batch is {batch}; .* has {there} row.s. of 16'):
      load(corpus, batch=batch, max_rows=limit)


def test_the_held_out_part_is_told_by_its_content(corpus):
  assert load(corpus).held_out_id == load(corpus, batch=4, max_rows=5).held_out_id
  assert load(corpus).held_out_id != load(corpus, held_out=0.4).held_out_id


def test_a_token_that_the_base_does_not_have_is_refused(corpus):
  found = load(corpus)
  ids = [*found.rows.stream, *(i for b in found.held_out for i in b['tokens'].ravel())]
  highest = int(max(ids))
  experiment = config.Experiment(data=config.DataConfig(corpus=corpus, length=16))

  def base(vocab):
    return types.SimpleNamespace(config=types.SimpleNamespace(max_length=128, vocab=vocab))

  text.check_text(experiment, found, base(highest + 1))
  with pytest.raises(ValueError, match=rf'gives token {highest} .* is 0 to {highest - 1}\.'):
    text.check_text(experiment, found, base(highest))
  prompted = dataclasses.replace(found, prompts=[[1, highest + 7]])
  with pytest.raises(ValueError, match=rf'gives token {highest + 7} '):
    text.check_text(experiment, prompted, base(highest + 1))

"""Packing: every id predicted once, completions only, and nothing lost without a word."""

import dataclasses

import numpy as np
import pytest

from peftlab.data.corpora import Corpus, Example, load_corpus, split_corpus
from peftlab.data.packing import pack
from peftlab.data.tokenizers import load_tokenizer

SMOLLM2 = load_tokenizer('smollm2')
GLASSLLM = load_tokenizer('glassllm')
EOS = 2


def _texts(*texts):
  return Corpus(name='t', examples=tuple(Example(where='Row', text=text) for text in texts))


def _asked(*pairs, separator=''):
  examples = tuple(Example(where='Row', prompt=p, completion=c) for p, c in pairs)
  return Corpus(name='t', examples=examples, separator=separator)


def _all(rows):
  return rows.batch(range(len(rows)))


def test_pretrain_rows_written_out():
  a, b, c = (SMOLLM2.encode(letter)[0] for letter in 'abc')
  rows, report = pack(_texts('a', 'b\x00c', 'a'), SMOLLM2, objective='pretrain', length=5)
  nul = SMOLLM2.encode('\x00')[0]
  batch = _all(rows)
  expected = {
    'tokens': [[a, EOS, b, nul, c], [a, EOS, 2, 2, 2]],
    'targets': [[EOS, 2, nul, c, EOS], [EOS, 2, 2, 2, 2]],
    'loss_mask': [[1, 0, 1, 1, 1], [1, 0, 0, 0, 0]],
    'positions': [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]],
    'segment_ids': [[1, 1, 2, 2, 2], [1, 1, 0, 0, 0]],
  }
  assert {name: array.tolist() for name, array in batch.items()} == expected
  assert {name: str(array.dtype) for name, array in batch.items()} == {
    'tokens': 'int32',
    'targets': 'int32',
    'loss_mask': 'float32',
    'positions': 'int32',
    'segment_ids': 'int32',
  }
  assert (report.tokens, report.predicted, report.used) == (7, 5, 3)


def test_a_long_document_goes_on_in_the_next_row():
  text = ' a' * 6  # 6 ids and eos: a row of 4, then 3
  rows, _ = pack(_texts(text), SMOLLM2, objective='pretrain', length=4)
  batch = _all(rows)
  (a,) = set(SMOLLM2.encode(text))
  assert batch['tokens'].tolist() == [[a] * 4, [a, a, EOS, 2]]
  assert batch['targets'].tolist() == [[a] * 4, [a, EOS, 2, 2]]
  assert batch['loss_mask'].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
  assert batch['positions'].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]


@pytest.mark.parametrize('length', (2, 31, 128, 1000))
def test_pretrain_predicts_every_id_but_the_first_once(length):
  corpus = Corpus(name='g', examples=load_corpus('gsm8k').examples[:40], separator='\n')
  rows, report = pack(corpus, SMOLLM2, objective='pretrain', length=length)
  batch = _all(rows)
  documents = [[*SMOLLM2.encode(corpus.plain_text(e)), EOS] for e in corpus.examples]
  predicted = batch['targets'][batch['loss_mask'] == 1].tolist()
  assert predicted == [i for document in documents for i in document[1:]]
  assert report.predicted == len(predicted)
  assert (batch['segment_ids'] > 0)[:-1].all()
  _check_shift(batch)


def _check_shift(batch):
  """Inside a segment, the target is the next token and the position counts on."""
  same = batch['segment_ids'][:, 1:] == batch['segment_ids'][:, :-1]
  same &= batch['segment_ids'][:, 1:] > 0
  np.testing.assert_array_equal(batch['targets'][:, :-1][same], batch['tokens'][:, 1:][same])
  steps = batch['positions'][:, 1:] - batch['positions'][:, :-1]
  assert (steps[same] == 1).all()
  starts = batch['positions'][:, 1:][~same]
  assert (starts == 0).all()
  assert (batch['positions'][:, 0] == 0).all()
  assert (batch['loss_mask'][batch['segment_ids'] == 0] == 0).all()


def test_sft_in_plain_text_predicts_the_completion_and_its_end():
  corpus = _asked(('Q: x', 'yes'), separator='\n')
  rows, _ = pack(corpus, SMOLLM2, objective='sft', template='plain', length=12)
  batch = _all(rows)
  prompt, answer = SMOLLM2.encode('Q: x\n'), SMOLLM2.encode('yes')
  ids = [*prompt, *answer, EOS]
  mask = [0] * (len(prompt) - 1) + [1] * (len(answer) + 1)
  assert batch['tokens'][0, : len(ids) - 1].tolist() == ids[:-1]
  assert batch['targets'][0, : len(ids) - 1].tolist() == ids[1:]
  assert batch['loss_mask'][0].tolist() == mask + [0] * (12 - len(mask))
  assert batch['segment_ids'][0].tolist() == [1] * len(ids) + [0] * (12 - len(ids))


@pytest.mark.parametrize('packed', (True, False))
def test_sft_by_chat_predicts_the_answers_only(packed):
  corpus = Corpus(name='g', examples=load_corpus('gsm8k').examples[:30])
  rows, report = pack(corpus, SMOLLM2, objective='sft', length=1024, packed=packed)
  batch = _all(rows)
  predicted = batch['targets'][batch['loss_mask'] == 1].tolist()
  said = SMOLLM2.decode(predicted).split('<|im_end|>')
  assert sorted(said) == sorted([*(e.completion for e in corpus.examples), ''])
  assert (report.used, report.truncated, report.cut_away) == (30, 0, 0)
  assert len(rows) == report.rows
  assert report.rows < 15 if packed else report.rows == 30
  assert packed == (batch['segment_ids'].max() > 1)
  _check_shift(batch)


def test_an_sft_row_holds_whole_documents():
  corpus = Corpus(name='g', examples=load_corpus('gsm8k').examples[:60])
  rows, report = pack(corpus, SMOLLM2, objective='sft', length=400)
  batch = _all(rows)
  assert report.truncated == 0
  starts = batch['tokens'][(batch['positions'] == 0) & (batch['segment_ids'] > 0)]
  assert len(starts) == 60
  assert set(starts.tolist()) == {1}  # <|im_start|>


def test_what_does_not_fit_is_counted():
  corpus = _asked(('a', 'b'), ('a', ' b' * 50), (' a' * 50, 'b'))
  rows, report = pack(corpus, SMOLLM2, objective='sft', template='plain', length=10, packed=False)
  assert (report.documents, report.used, report.truncated, report.cut_away) == (3, 2, 1, 1)
  batch = _all(rows)
  assert batch['loss_mask'].sum(axis=1).tolist() == [2, 10]
  b = SMOLLM2.encode(' b')[0]
  assert batch['targets'][1].tolist() == [b] * 10
  assert '1 truncated; 1 left out with the whole completion cut off.' in str(report)


def test_a_completion_that_just_fits_is_whole():
  ids = len(SMOLLM2.encode('a')) + len(SMOLLM2.encode(' b' * 9)) + 1
  corpus = _asked(('a', ' b' * 9))
  rows, report = pack(corpus, SMOLLM2, objective='sft', template='plain', length=ids - 1)
  assert report.truncated == 0
  assert _all(rows)['targets'][0, -1] == EOS
  assert pack(corpus, SMOLLM2, objective='sft', template='plain', length=ids - 2)[1].truncated == 1


def test_dialogues_without_an_answer_are_counted():
  corpus = load_corpus('chitchat')
  corpus = Corpus(name='c', examples=corpus.examples[:300])
  silent = sum(all(m['role'] == 'user' for m in e.messages) for e in corpus.examples)
  _, report = pack(corpus, SMOLLM2, objective='sft', length=4096)
  assert silent > 50
  assert (report.without_completion, report.used) == (silent, 300 - silent)
  assert f'{silent} left out without a completion' in str(report)


def test_characters_without_a_token_are_counted():
  _, report = pack(_texts('a\x04b\x06', 'c'), SMOLLM2, objective='pretrain', length=8)
  assert report.lost_characters == 2
  assert '2 characters without a token' in str(report)


def test_max_rows_is_the_beginning_of_all_rows():
  corpus, _ = split_corpus(load_corpus('chitchat'))
  few, report = pack(corpus, SMOLLM2, objective='pretrain', length=64, max_rows=20)
  more, _ = pack(corpus, SMOLLM2, objective='pretrain', length=64, max_rows=50)
  assert (len(few), len(more)) == (20, 50)
  for name, array in _all(few).items():
    np.testing.assert_array_equal(array, more.batch(range(20))[name])
  assert report.unread > 6000
  assert 'not read' in str(report)


def test_a_bos_starts_every_document():
  tokenizer = dataclasses.replace(SMOLLM2, bos_id=1)
  rows, _ = pack(_texts('a', 'b'), tokenizer, objective='pretrain', length=8)
  a, b = (SMOLLM2.encode(letter)[0] for letter in 'ab')
  assert _all(rows)['tokens'][0].tolist() == [1, a, EOS, 1, b, EOS, 2, 2]
  assert _all(rows)['loss_mask'][0].tolist() == [1, 1, 0, 1, 1, 0, 0, 0]


def test_glassllm_packs_chitchat_as_text():
  corpus = load_corpus('chitchat')
  corpus = Corpus(name='c', examples=corpus.examples[:50])
  rows, _ = pack(corpus, GLASSLLM, objective='pretrain', length=127)
  batch = _all(rows)
  assert batch['tokens'].max() < 1024
  assert (batch['tokens'][batch['segment_ids'] == 0] == 0).all()


@pytest.mark.parametrize(
  ('corpus', 'options', 'message'),
  (
    (_texts('a'), {'objective': 'sf'}, "No objective 'sf'; did you mean 'sft'"),
    (_texts('a'), {'objective': 'sft'}, 'Row is a text and has no completion: objective sft'),
    (_texts('a'), {'template': 'chatt'}, "No template 'chatt'; did you mean 'chat'"),
    (_texts('a'), {'length': 1}, 'A row length of 1 has nothing to predict'),
    (
      _asked((' a' * 9, 'b')),
      {'objective': 'sft', 'template': 'plain', 'length': 4},
      "Corpus 't' of 1 documents gives no rows of 4 for sft: 1 cut away",
    ),
  ),
)
def test_what_cannot_be_packed_is_refused(corpus, options, message):
  options = {'objective': 'pretrain', 'length': 8} | options
  with pytest.raises(ValueError, match=message):
    pack(corpus, SMOLLM2, **options)


def test_a_chat_without_a_template_is_refused():
  message = {'role': 'user', 'content': 'hi'}
  corpus = Corpus(name='c', examples=(Example(where='Row 3', messages=(message,)),))
  with pytest.raises(ValueError, match=r"Row 3 is a chat and needs a chat template.*'glassllm:en'"):
    pack(corpus, GLASSLLM, objective='sft', length=8)
  with pytest.raises(ValueError, match="Tokenizer 'glassllm:en' has no chat template"):
    pack(corpus, GLASSLLM, objective='sft', template='chat', length=8)

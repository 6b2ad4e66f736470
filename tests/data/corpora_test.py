"""Corpora: the packaged ones, the user's own files row by row, and the splits."""

import collections
import json

import pytest

from peftlab.data import text_files
from peftlab.data.corpora import Corpus, Example, load_corpus, split_corpus


@pytest.fixture(scope='module')
def chitchat():
  return load_corpus('chitchat')


@pytest.fixture(scope='module')
def gsm8k():
  return load_corpus('gsm8k')


def test_chitchat_is_the_published_7168_dialogues_of_two(chitchat):
  assert len(chitchat.examples) == 7168
  assert len({example.conversation for example in chitchat.examples}) == 7168
  roles = collections.Counter(
    tuple(sorted({message['role'] for message in example.messages}))
    for example in chitchat.examples
  )
  # 3,150 have one person in the file; in one of the others the second says nothing.
  assert roles == {('user',): 3151, ('assistant', 'user'): 4017}
  assert all(example.messages[0]['role'] == 'user' for example in chitchat.examples)
  for example in chitchat.examples:
    said = [message['role'] for message in example.messages]
    assert said == [('user', 'assistant')[i % 2] for i in range(len(said))]
    assert all(message['content'].strip() for message in example.messages)


def test_a_dialogue_is_read_in_order(chitchat):
  first = chitchat.examples[0]
  assert first.conversation == 'a07edb12-6b91-4138-b11e-02421888d699'
  assert first.messages[:2] == (
    {'role': 'user', 'content': 'Hello\nHow are you doing today?'},
    {'role': 'assistant', 'content': 'whats up MD\nim doing good\nhow are you doing?'},
  )
  assert chitchat.plain_text(first).startswith('Hello\nHow are you doing today?\nwhats up MD\n')


def test_gsm8k_is_the_1319_rows_of_its_test_split(gsm8k):
  assert len(gsm8k.examples) == 1319
  first = gsm8k.examples[0]
  assert first.prompt.startswith('Janet’s ducks lay 16 eggs per day.')
  assert first.completion.endswith('#### 18')
  assert gsm8k.plain_text(first) == f'{first.prompt}\n{first.completion}'


def _jsonl(path, *rows):
  lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
  path.write_bytes(b'\n'.join(lines) + b'\n')
  return path


def test_the_three_kinds_of_rows_are_read(tmp_path):
  chat = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]
  path = _jsonl(
    tmp_path / 'a.jsonl',
    b'\xef\xbb\xbf{"text": "one"}',
    b'',
    {'prompt': 'p', 'completion': ' c', 'id': 7},
    {'messages': chat, 'id': 'x'},
  )
  corpus = load_corpus(path)
  assert corpus.name == 'a.jsonl'
  assert [corpus.plain_text(e) for e in corpus.examples] == ['one', 'p c', 'q\na']
  assert [e.conversation for e in corpus.examples] == [None, '7', 'x']
  assert corpus.examples[1].where == f"Row 3 of '{path}'"


BAD_ROWS = {
  'json': (b'{"text": "a"', 'is not valid JSON'),
  'list': (b'["a"]', 'holds a list; expected an object'),
  'twice': (b'{"text": "a", "text": "b"}', "the key 'text' is there twice"),
  'utf8': (b'{"text": "\xff"}', 'is not UTF-8'),
  'key': ({'promt': 'a', 'completion': 'b'}, "has the key 'promt'; did you mean 'prompt'"),
  'extra': ({'text': 'a', 'score': 1}, "has the key 'score'. Expected: {text}"),
  'half': (
    {'prompt': 'a'},
    r"has the keys \['prompt'\]. Expected: {text}, {prompt, completion} or",
  ),
  'both': ({'text': 'a', 'messages': []}, r"has the keys \['messages', 'text'\]"),
  'none': ({}, r'has the keys \[\]'),
  'number': ({'text': 3}, 'has text 3; expected text'),
  'null': ({'prompt': 'a', 'completion': None}, 'has completion None; expected text'),
  'empty': ({'text': ' \n'}, 'has an empty text'),
  'no_answer': ({'prompt': 'a', 'completion': ''}, 'has an empty completion'),
  'surrogate': (b'{"text": "\\ud800"}', 'half of a surrogate pair'),
  'id': ({'text': 'a', 'id': [1]}, r'has id \[1\]; expected text or a whole number'),
  'chat': ({'messages': 'hi'}, "has messages 'hi'; expected a list"),
  'no_messages': ({'messages': []}, 'expected a list of one or more'),
  'message': ({'messages': [{'rol': 'user', 'content': ''}]}, 'expected the keys role and content'),
  'role': (
    {'messages': [{'role': 'usr', 'content': ''}]},
    "has message 0 of role 'usr'; did you mean 'user'",
  ),
  'content': ({'messages': [{'role': 'user', 'content': 1}]}, 'message 0 with content 1, not text'),
  'late_system': (
    {'messages': [{'role': 'user', 'content': ''}, {'role': 'system', 'content': ''}]},
    'a system message at place 1',
  ),
}


@pytest.mark.parametrize('case', BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(case, tmp_path):
  row, message = BAD_ROWS[case]
  path = _jsonl(tmp_path / 'bad.jsonl', {'text': 'good'}, row)
  with pytest.raises(ValueError, match=message) as error:
    load_corpus(path)
  assert str(error.value).startswith((f"Row 2 of '{path}'", f"Line 2 of '{path}'"))
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('source', 'message'),
  (
    ('chitcat', "No corpus 'chitcat'; did you mean 'chitchat'"),
    ('a.csv', r"No corpus 'a\.csv'\. Expected a \.txt or \.jsonl file, or one of: chitchat"),
    (None, r'No corpus None; expected a name, or a \.txt or \.jsonl file'),
    ('', r"No corpus ''\. Expected a"),
    ('none.jsonl', r"No file 'none\.jsonl'"),
    ('no/such.txt', r"No file 'no/such\.txt'; its folder 'no' does not exist either"),
  ),
)
def test_an_unknown_corpus_is_answered(source, message):
  with pytest.raises(ValueError, match=message):
    load_corpus(source)


def test_files_without_text_are_refused(tmp_path):
  for name, message in (('a.jsonl', 'has no rows'), ('a.txt', 'has no text')):
    (tmp_path / name).write_text('\n \n')
    with pytest.raises(ValueError, match=message):
      load_corpus(tmp_path / name)
    (tmp_path / name).write_text('')
    with pytest.raises(ValueError, match=message):
      load_corpus(tmp_path / name)


def test_a_text_file_is_cut_at_blank_lines_and_loses_nothing(tmp_path):
  paragraph = 'A line of some words.\r\n' * 30 + '\n\n'
  text = paragraph * 10 + 'x' * 9000 + '\n' + 'The end\n\n\n'
  (tmp_path / 'a.txt').write_bytes(text.encode())
  examples = load_corpus(tmp_path / 'a.txt').examples
  assert ''.join(example.text for example in examples) == text
  assert [len(example.text) for example in examples] == [2075, 2076, 2076, 9694, 10]
  assert all(example.text.endswith('\n') for example in examples)
  assert examples[1].where == f"Line 96 of '{tmp_path / 'a.txt'}'"


def test_a_text_file_with_a_bad_byte_is_named_by_line(tmp_path):
  (tmp_path / 'a.txt').write_bytes(b'good\nb\xe9d\n')
  with pytest.raises(ValueError, match=r"Line 2 of '.*a\.txt' is not UTF-8"):
    load_corpus(tmp_path / 'a.txt')


@pytest.mark.parametrize('by', ('position', 'hash', 'conversation'))
def test_a_split_is_a_partition_in_order(chitchat, by):
  train, held_out = split_corpus(chitchat, by=by, held_out=0.1)
  places = {example.where: i for i, example in enumerate(chitchat.examples)}
  found = [[places[e.where] for e in part.examples] for part in (train, held_out)]
  assert all(part == sorted(part) for part in found)
  assert sorted(found[0] + found[1]) == list(range(7168))
  # 717 of 7168; a share drawn by hash has a standard deviation of 25, more where texts repeat.
  assert abs(len(held_out.examples) - 717) <= {'position': 0, 'hash': 150, 'conversation': 75}[by]
  assert split_corpus(chitchat, by=by, held_out=0.1)[1] == held_out
  assert held_out.name == f'chitchat[held-out, {by}, 0.1]'


def test_a_split_by_position_holds_out_the_end(gsm8k):
  train, held_out = split_corpus(gsm8k, held_out=0.25)
  assert train.examples == gsm8k.examples[:989]
  assert held_out.examples == gsm8k.examples[989:]


def test_equal_texts_and_whole_conversations_stay_together():
  examples = [
    Example(where=f'Row {i}', text=f'text {i % 50}', conversation=str(i % 20)) for i in range(400)
  ]
  corpus = Corpus(name='x', examples=tuple(examples))
  for by, key in (('hash', 'text'), ('conversation', 'conversation')):
    train, held_out = split_corpus(corpus, by=by, held_out=0.3)
    sides = [{getattr(example, key) for example in part.examples} for part in (train, held_out)]
    assert not sides[0] & sides[1]


def test_impossible_splits_are_refused(gsm8k):
  with pytest.raises(ValueError, match="No split by 'postion'; did you mean 'position'"):
    split_corpus(gsm8k, by='postion')
  with pytest.raises(ValueError, match=r"Row 1 of gsm8k has no conversation \('id'\)"):
    split_corpus(gsm8k, by='conversation')
  with pytest.raises(ValueError, match=r'A held-out share of 1\.5 leaves a part empty'):
    split_corpus(gsm8k, held_out=1.5)
  one = Corpus(name='one', examples=gsm8k.examples[:1])
  with pytest.raises(
    ValueError, match=r"Corpus 'one' of 1 documents, .* leaves nothing for 'one\["
  ):
    split_corpus(one)


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
  monkeypatch.setattr('peftlab.formats.packages.VERSIONS', {'chitchat-dataset': '9'})
  monkeypatch.setattr('importlib.metadata.Distribution.discover', lambda **_: iter(()))
  with pytest.raises(ValueError, match=r'Run: pip install --no-deps chitchat-dataset==9$'):
    load_corpus('chitchat')


@pytest.mark.parametrize('line', ('word ' * 10_000, 'a' * 50_000, 'a' * 9_000 + ' b' * 20_000))
def test_a_text_of_one_long_line_is_several_documents(line, tmp_path):
  path = tmp_path / 'one.txt'
  path.write_text(line)
  documents = [text for _, text in text_files.read_txt(path)]
  assert ''.join(documents) == line
  assert len(documents) > len(line) // 24_000
  assert max(map(len, documents)) <= 24_000
  assert not line.startswith('word') or all(d.endswith(' ') for d in documents)

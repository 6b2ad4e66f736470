"""Prompts as ids, and ids as text while they come."""

from __future__ import annotations

from collections.abc import Sequence

from peftlab.data.tokenizers import Tokenizer

_BROKEN = '\ufffd'  # what decoding gives for the first bytes of a character


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: bool = False) -> list[int]:
  """The ids of a prompt, as the training text is written: plain, or as a user's message.

  Args:
    tokenizer: of the base.
    prompt: the text.
    chat: put into the chat template, ended with the opening of the assistant's message.

  Raises:
    ValueError: a chat without a chat template.
  """
  start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  if chat:
    return start + tokenizer.chat([{'role': 'user', 'content': prompt}], generate=True)[0]
  return start + tokenizer.encode(prompt)


class TextStream:
  """The text of new tokens, piece by piece: what is added up is the text of all of them.

  Half of a character is kept back until its other bytes are there.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
    self._tokenizer = tokenizer
    self._ids = list(prompt)
    self._shown = len(self._text())

  def add(self, token: int) -> str:
    """The text that a token adds."""
    self._ids.append(token)
    text = self._text()
    return '' if text.endswith(_BROKEN) else self._show(text)

  def end(self) -> str:
    """What was kept back."""
    return self._show(self._text())

  def _text(self) -> str:
    return self._tokenizer.decode(self._ids, special=False)

  def _show(self, text: str) -> str:
    new, self._shown = text[self._shown :], len(text)
    return new


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
  """The text of some tokens behind a prompt."""
  stream = TextStream(tokenizer, prompt)
  return ''.join([*map(stream.add, tokens), stream.end()])

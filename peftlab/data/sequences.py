"""One document as ids, and which of them are to be predicted, for each objective and template."""

import dataclasses

import numpy as np

from peftlab._registry import did_you_mean
from peftlab.data.chat import Message
from peftlab.data.corpora import Corpus, Example
from peftlab.data.tokenizers import Tokenizer

OBJECTIVES = ('pretrain', 'sft')
TEMPLATES = ('auto', 'chat', 'plain')


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSequence:
  """The ids of a document.

  Attributes:
    ids: int32 [n].
    predicted: bool [n], the ids that count in the loss as targets; the first is never one.
  """

  ids: np.ndarray
  predicted: np.ndarray


def choose_template(tokenizer: Tokenizer, *, objective: str, template: str) -> str:
  """'chat' or 'plain': what `template` means for this objective and tokenizer.

  'auto' is plain for pretrain, and for sft chat where the tokenizer has a chat format.

  Raises:
    ValueError: an unknown objective or template.
  """
  _check_choice('objective', objective, OBJECTIVES)
  _check_choice('template', template, TEMPLATES)
  if template == 'auto':
    return 'chat' if objective == 'sft' and tokenizer.chat_format else 'plain'
  return template


def to_sequence(
  corpus: Corpus, example: Example, tokenizer: Tokenizer, *, objective: str, template: str
) -> TokenSequence:
  """A document as ids: pretrain predicts every id, sft the completions with their ends.

  Args:
    corpus: where it is from.
    example: the document.
    tokenizer: its bos, if any, starts every document; its eos ends a plain one.
    objective: 'pretrain' or 'sft'.
    template: 'chat' or 'plain', see `choose_template`.

  Raises:
    ValueError: sft on a text, or on a chat without a chat template.
  """
  if template == 'chat' and example.text is None:
    ids, mask = tokenizer.chat(_messages(example))
  elif objective == 'pretrain':
    ids = [*tokenizer.encode(corpus.plain_text(example)), tokenizer.eos_id]
    mask = [1] * len(ids)
  else:
    ids, mask = _prompt_and_completion(corpus, example, tokenizer)
  start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  predicted = np.array([0] * len(start) + mask, bool)
  if objective == 'pretrain':
    predicted[:] = True
  predicted[:1] = False
  return TokenSequence(ids=np.array(start + ids, np.int32), predicted=predicted)


def _messages(example: Example) -> tuple[Message, ...]:
  if example.messages is not None:
    return example.messages
  return (
    {'role': 'user', 'content': example.prompt or ''},
    {'role': 'assistant', 'content': example.completion or ''},
  )


def _prompt_and_completion(
  corpus: Corpus, example: Example, tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
  """Encoded apart, so that the border is exact and the prompt is what sampling will start from."""
  if example.completion is None:
    kind = 'a text' if example.messages is None else 'a chat'
    reason = (
      'has no completion: objective sft needs prompt and completion, or messages; pretrain takes it'
      if example.messages is None
      else f"needs a chat template, which tokenizer '{tokenizer.name}' lacks or was told not to use"
    )
    raise ValueError(f'{example.where} is {kind} and {reason}.')
  prompt = tokenizer.encode(f'{example.prompt}{corpus.separator}')
  completion = [*tokenizer.encode(example.completion), tokenizer.eos_id]
  return prompt + completion, [0] * len(prompt) + [1] * len(completion)


def _check_choice(kind: str, given: str, choices: tuple[str, ...]) -> None:
  if given not in choices:
    near = did_you_mean(given, choices)
    raise ValueError(f"No {kind} '{given}'{near or '.'} Choices: {', '.join(choices)}.")

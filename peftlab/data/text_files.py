"""The user's own .txt and .jsonl files, read strictly: a bad row is named by file and line."""

from collections.abc import Iterator
import pathlib
from typing import Any

from peftlab._registry import did_you_mean
from peftlab.data import chat
from peftlab.formats import files

KINDS = (('text',), ('prompt', 'completion'), ('messages',))
_KEYS = ('text', 'prompt', 'completion', 'messages', 'id')
_EXPECTED = '{text}, {prompt, completion} or {messages}, and optionally id'
_DOCUMENT, _LONGEST = 2000, 8000  # characters of a document of a .txt file


def read_jsonl(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Each row's place ("Row 3 of 'a.jsonl'") and its fields; blank lines are skipped.

  Raises:
    ValueError: not UTF-8, not JSON, other keys than those of one kind, a value of another type,
      an empty text; no rows at all.
  """
  count = 0
  with files.existing_file(path).open('rb') as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        count += 1
        subject = f"Row {number} of '{path}'"
        yield (
          subject,
          _fields(files.parse_json(_decode(line, number, path), subject=subject), subject),
        )
  if not count:
    raise ValueError(f"'{path}' has no rows; expected one JSON object a line: {_EXPECTED}.")


def read_txt(path: pathlib.Path) -> list[tuple[str, str]]:
  """Documents of a text file and their places: joined, they are the file, nothing lost.

  A document ends at the first blank line after 2,000 characters, or at the first line end after
  8,000. A line of more than 16,000 is cut into several, at spaces where there are any.
  """
  documents: list[tuple[str, str]] = []
  document, where = '', ''
  with files.existing_file(path).open('rb') as file:
    for number, line in enumerate(file, start=1):
      for text in _pieces(_decode(line, number, path)):
        where = where or f"Line {number} of '{path}'"
        document += text
        if len(document) >= (_LONGEST if text.strip() else _DOCUMENT):
          documents.append((where, document))
          document, where = '', ''
  if document.strip() or not documents:
    documents.append((where, document))
  elif document:  # blank lines at the end of the file
    documents[-1] = (documents[-1][0], documents[-1][1] + document)
  if not documents[0][1].strip():
    raise ValueError(f"'{path}' has no text.")
  return documents


def _pieces(line: str) -> Iterator[str]:
  """A line in pieces of at most 16,000 characters."""
  while len(line) > 2 * _LONGEST:
    cut = line.rfind(' ', _LONGEST, 2 * _LONGEST) + 1 or _LONGEST
    yield line[:cut]
    line = line[cut:]
  yield line


def _decode(line: bytes, number: int, path: pathlib.Path) -> str:
  try:
    return line.decode('utf-8-sig' if number == 1 else 'utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(f"Line {number} of '{path}' is not UTF-8: {error}.") from error


def _fields(row: dict[str, Any], subject: str) -> dict[str, Any]:
  """The arguments of an Example."""
  for key in row:
    if key not in _KEYS:
      near = did_you_mean(key, _KEYS)
      raise ValueError(f"{subject} has the key '{key}'{near or '.'} Expected: {_EXPECTED}.")
  keys = tuple(key for key in _KEYS if key in row and key != 'id')
  if keys not in KINDS:
    raise ValueError(f'{subject} has the keys {sorted(row)}. Expected: {_EXPECTED}.')
  fields: dict[str, Any] = {}
  if 'id' in row:
    if type(row['id']) not in (int, str):
      raise ValueError(f'{subject} has id {row["id"]!r:.60}; expected text or a whole number.')
    fields['conversation'] = str(row['id'])
  if keys == ('messages',):
    messages = chat.check_messages(row['messages'], subject=subject)
    for number, message in enumerate(messages):
      _check_text(message['content'], f'message {number}', subject, empty=True)
    return fields | {'messages': tuple(messages)}
  for key in keys:
    _check_text(row[key], key, subject, empty=key == 'prompt')
  return fields | {key: row[key] for key in keys}


def _check_text(value: object, key: str, subject: str, *, empty: bool) -> None:
  if not isinstance(value, str):
    raise ValueError(f'{subject} has {key} {value!r:.60}; expected text.')
  if not empty and not value.strip():
    raise ValueError(f'{subject} has an empty {key}.')
  try:
    value.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f'{subject} has {key} with half of a surrogate pair: {error}.') from error

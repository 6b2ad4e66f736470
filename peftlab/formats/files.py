"""Any file replaced atomically, JSON read strictly, pickles refused by name."""

from collections.abc import Callable
import json
import os
import pathlib
import tempfile
from typing import IO, Any

from peftlab._registry import did_you_mean

_PICKLES = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.pickle')


def replace_file(
  path: str | os.PathLike[str],
  write: Callable[[IO[bytes]], object],
  *,
  check: Callable[[pathlib.Path], None] | None = None,
) -> None:
  """Writes a file whole or not at all: temporary file, fsync, check, `os.replace`.

  Args:
    path: the file to create or replace; its folder exists.
    write: writes the content to the open binary file.
    check: reads the temporary file back and raises where it is not what was meant.
  """
  path = pathlib.Path(path)
  descriptor, name = tempfile.mkstemp(prefix=f'.{path.name}.', suffix='.tmp', dir=path.parent)
  temporary = pathlib.Path(name)
  try:
    with os.fdopen(descriptor, 'wb') as file:
      write(file)
      file.flush()
      os.fsync(file.fileno())
    if check is not None:
      check(temporary)
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(temporary, 0o666 & ~umask)  # mkstemp made it readable by its owner alone
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
  """Writes `value` as indented JSON, atomically.

  Raises:
    ValueError: it holds a NaN or an infinity, which JSON has no word for.
  """
  content = (json.dumps(value, indent=2, allow_nan=False) + '\n').encode()
  replace_file(path, lambda file: file.write(content))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    ValueError: no such file, not UTF-8, not JSON (with line and column), not an object, or one of
      its objects has a key twice.
  """
  content = existing_file(path).read_bytes()
  return parse_json(content, subject=f"JSON file '{path}'")


def parse_json(content: bytes | str, *, subject: str) -> dict[str, Any]:
  """Parses a JSON object; every error starts with `subject` (file, or file and row)."""
  try:
    value = json.loads(content, object_pairs_hook=_unique)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{subject} is not valid JSON: {error}.') from error
  if not isinstance(value, dict):
    raise ValueError(f'{subject} holds a {type(value).__name__}; expected an object {{...}}.')
  return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  result = dict(pairs)
  if len(result) != len(pairs):
    keys = [key for key, _ in pairs]
    twice = next(key for key in result if keys.count(key) > 1)
    raise ValueError(f'the key {twice!r} is there twice')
  return result


def existing_file(path: str | os.PathLike[str]) -> pathlib.Path:
  """`path`, where it is a file.

  Raises:
    ValueError: it is missing or a folder; the message has the nearest name beside it.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    raise ValueError(f"'{path}' is a folder; expected a file.")
  if not path.is_file():
    raise ValueError(f"No file '{path}'{_beside(path)}")
  return path


def existing_folder(path: str | os.PathLike[str]) -> pathlib.Path:
  """`path`, where it is a folder; ValueError otherwise."""
  path = pathlib.Path(path)
  if path.is_file():
    raise ValueError(f"'{path}' is a file; expected a folder.")
  if not path.is_dir():
    raise ValueError(f"No folder '{path}'{_beside(path)}")
  return path


def refuse_pickle(path: str | os.PathLike[str]) -> None:
  """Refuses a file that pickle or torch.load would have to read.

  Raises:
    ValueError: the name or the first bytes are those of a pickle or of a torch archive.
  """
  path = pathlib.Path(path)
  with path.open('rb') as file:
    start = file.read(4)
  if path.suffix in _PICKLES or start == b'PK\x03\x04' or start[:2] in (b'\x80\x02', b'\x80\x04'):
    raise ValueError(
      f"'{path}' is a pickle, which can run code when it is read: refused. Expected .safetensors "
      '(save_pretrained(..., safe_serialization=True) writes it).'
    )


def pickles_in(folder: pathlib.Path) -> list[str]:
  """Names of the files in `folder` that end like pickles, sorted."""
  return sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)


def _beside(path: pathlib.Path) -> str:
  """The end of a sentence about a missing path: the nearest name in its folder, if any."""
  if not path.parent.is_dir():
    return f"; its folder '{path.parent}' does not exist either."
  return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()]) or '.'

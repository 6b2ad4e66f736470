"""Any file replaced atomically, JSON read strictly, pickles refused by name."""

from collections.abc import Callable, Collection, Iterable
import difflib
import json
import os
import pathlib
import tempfile
from typing import IO, Any

_NEAR = 0.6  # of the letters of a name
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
  path = _given(path)
  if path.is_dir():
    raise ValueError(f"'{path}' is a folder; expected a file.")
  if not path.is_file():
    raise ValueError(f"No file '{path}'{_beside(path)}")
  return path


def existing_folder(path: str | os.PathLike[str]) -> pathlib.Path:
  """`path`, where it is a folder; ValueError otherwise."""
  path = _given(path)
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
    start = file.read(9)
  # The length of a safetensors header can begin so too (640), but no pickle goes on as it does.
  pickled = start[:2] in (b'\x80\x02', b'\x80\x04') and start[4:] != b'\0\0\0\0{'
  if path.suffix in _PICKLES or start[:4] == b'PK\x03\x04' or pickled:
    raise ValueError(
      f"'{path}' is a pickle, which can run code when it is read: refused. Expected .safetensors "
      '(save_pretrained(..., safe_serialization=True) writes it).'
    )


def pickles_in(folder: pathlib.Path) -> list[str]:
  """Names of the files in `folder` that end like pickles, sorted."""
  return sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)


def _given(path: Any, subject: str = 'The path') -> pathlib.Path:
  if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
    raise ValueError(f'{subject} is {path!r:.60}; expected the path of a file or folder.')
  return pathlib.Path(path)


def near_path(path: str | os.PathLike[str], *, suffixes: Collection[str] = ()) -> str:
  """`"; did you mean 'folder/x'?"` for the path nearest to a missing one, `''` where none is near.

  Part by part: of a folder that is not there the nearest one beside it is meant. Suffixes are not
  compared: `a.txt` is not near to `b.txt`.

  Args:
    path: what is missing.
    suffixes: of the files that would do ('.py'); none: any, and folders.
  """
  path = pathlib.Path(path)
  if path.exists():  # but of another kind than was expected
    return ''
  found = pathlib.Path(path.anchor)
  for part in path.relative_to(path.anchor).parts:
    if (found / part).exists():
      found /= part
      continue
    names = _names(found, suffixes if part == path.name else ())
    scored = [(_likeness(part, name), name) for name in names]
    best = max(scored, default=((0.0, False), ''))
    if best[0][0] < _NEAR:
      return ''
    found /= best[1]
  return f"; did you mean '{found}'?"


def _names(folder: pathlib.Path, suffixes: Collection[str]) -> list[str]:
  if not folder.is_dir():
    return []
  entries = sorted(folder.iterdir())
  names = [e.name for e in entries if not suffixes or e.suffix in suffixes]
  return [name for name in names if not name.startswith('.')]


def _likeness(one: str, other: str) -> tuple[float, bool]:
  """How alike the stems of two names are, 0 to 1; then whether their suffixes are the same."""
  a, b = pathlib.Path(one), pathlib.Path(other)
  ratio = difflib.SequenceMatcher(None, a.stem.lower(), b.stem.lower()).ratio()
  return ratio, a.suffix == b.suffix


def _beside(path: pathlib.Path) -> str:
  """The end of a sentence about a missing path: what was meant, or that its folder is missing."""
  near = near_path(path)
  if not near and not path.parent.is_dir():
    return f"; its folder '{path.parent}' does not exist either."
  return near or '.'


def writable_folder(
  path: str | os.PathLike[str],
  *,
  subject: str,
  inputs: Iterable[str | os.PathLike[str]] = (),
  marker: str = '',
) -> pathlib.Path:
  """`path`, where it is a folder, or can be made in one that exists; nothing is made.

  Args:
    path: where something is to be written.
    subject: what, for messages: 'Adapter folder'.
    inputs: folders that are read for it, and must stay as they are.
    marker: a file that a folder of this kind has: one without it must be empty.

  Raises:
    ValueError: no path, a file, a missing parent, one of `inputs`, a folder of something else, or
      no right to write there.
  """
  path = _given(path, subject)
  if path.resolve() in (pathlib.Path(given).resolve() for given in inputs):
    raise ValueError(f"{subject} '{path}' is read for what is written; expected another folder.")
  if path.exists() and not path.is_dir():
    raise ValueError(f"{subject} '{path}' is a file; expected a folder.")
  if not path.exists() and not path.parent.is_dir():
    state = 'is a file' if path.parent.is_file() else 'does not exist'
    near = near_path(path.parent) if state == 'does not exist' else ''
    raise ValueError(f"{subject} '{path}' cannot be made: '{path.parent}' {state}{near or '.'}")
  readable = path.exists() and os.access(path, os.R_OK | os.X_OK)
  held = sorted(each.name for each in path.iterdir()) if readable else []
  if marker and held and marker not in held:
    raise ValueError(
      f"{subject} '{path}' holds {', '.join(held[:3])} and no {marker}; expected an empty folder, "
      'a new one, or one that was written before.'
    )
  if not os.access(path if path.exists() else path.parent, os.W_OK | os.X_OK):
    raise ValueError(f"{subject} '{path}' cannot be written: Permission denied.")
  return path

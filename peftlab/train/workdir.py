"""The folder of a run: claimed by one process, for one config, never mixed with another's."""

from __future__ import annotations

from collections.abc import Generator
import contextlib
import fcntl
import os
import pathlib
import shutil
import uuid

from peftlab import _processes
from peftlab.formats import files
from peftlab.train import checkpoints, fields, metrics
from peftlab.train.config import Experiment

CONFIG = 'config.json'
CHECKPOINTS = 'checkpoints'
ADAPTER = 'adapter'
SUMMARY = 'summary.json'
PAGE = 'index.html'
_LOCK = '.lock'
_RUN = (CHECKPOINTS, checkpoints.DAMAGED, ADAPTER, SUMMARY, PAGE, metrics.FILE)


def path_of(folder: str | os.PathLike[str]) -> pathlib.Path:
  """The path of a workdir; ValueError for '', which pathlib takes for the current folder."""
  if not os.fspath(folder):
    raise ValueError("The workdir is ''; expected the path of a folder.")
  return pathlib.Path(folder)


@contextlib.contextmanager
def claimed(
  folder: str | os.PathLike[str], experiment: Experiment, *, overwrite: bool = False
) -> Generator[pathlib.Path]:
  """Within the block the folder is this run's alone. A run of the same config is continued.

  A folder that was made for the run and is still empty when the block ends is removed again. Of
  several processes the first claims it for all; they must all see it.

  Args:
    folder: is made where there is none.
    experiment: the config.
    overwrite: what an earlier run left there (and nothing else) is removed first.

  Raises:
    ValueError: no path, the folder holds a run of another config, another process uses it, or not
      all processes of the run see it.
  """
  path, mark = path_of(folder), uuid.uuid4().hex
  with _processes.entered(_claimed(path, experiment, overwrite=overwrite, mark=mark)):
    _processes.check_shared(lambda: _text(path / _LOCK), mark, subject=f"Workdir '{path}'")
    yield path


def _text(path: pathlib.Path) -> str:
  return path.read_text(encoding='utf-8') if path.is_file() else ''


@contextlib.contextmanager
def _claimed(
  path: pathlib.Path, experiment: Experiment, *, overwrite: bool, mark: str
) -> Generator[None]:
  if path.exists() and not path.is_dir():
    raise ValueError(f"Workdir '{path}' is a file; expected a folder.")
  try:
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / _LOCK).open('a')  # 'w' would clear the mark of who holds it
  except OSError as error:
    raise ValueError(f"Workdir '{path}' cannot be written: {error.strerror}.") from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(f"Workdir '{path}' is in use by another run.") from error
    try:
      if overwrite:
        clear(path)
      check(path, experiment)
      lock.truncate(0)  # what a run that was killed left
      lock.write(mark)
      lock.flush()
      yield
    finally:
      lock.truncate(0)
      if [found.name for found in path.iterdir()] == [_LOCK]:
        shutil.rmtree(path)


def check(path: pathlib.Path, experiment: Experiment) -> None:
  """Raises ValueError where the folder holds the run of another config, or of an unknown one."""
  advice = 'give another workdir, or --overwrite to remove that run'
  held = [name for name in _RUN if _has_content(path / name)]
  if not held:
    return
  if not (path / CONFIG).exists():
    raise ValueError(f"Workdir '{path}' has {', '.join(held)} but no {CONFIG}; {advice}.")
  saved = files.read_json(path / CONFIG)
  try:
    checkpoints.check_same_config(saved, fields.to_dict(experiment), subject=f"Workdir '{path}'")
  except ValueError as error:
    raise ValueError(f'{str(error).removesuffix(".")}; {advice}.') from error


def _has_content(path: pathlib.Path) -> bool:
  if path.is_dir():
    return any(path.iterdir())
  return path.exists() and path.stat().st_size > 0


def write_config(path: pathlib.Path, experiment: Experiment) -> None:
  """Writes the resolved config, once it is known to make a run."""
  path.mkdir(parents=True, exist_ok=True)
  content = fields.to_json(experiment).encode()
  files.replace_file(path / CONFIG, lambda file: file.write(content))


def clear(path: pathlib.Path) -> None:
  """Removes what a run writes, and nothing else."""
  for name in (CONFIG, *_RUN):
    found = path / name
    if found.is_dir():
      shutil.rmtree(found)
    else:
      found.unlink(missing_ok=True)
  for found in path.glob('events.out.tfevents.*'):
    found.unlink()

"""The folder of a run: claimed by one process, for one config, never mixed with another's."""

from __future__ import annotations

from collections.abc import Generator
import contextlib
import fcntl
import os
import pathlib
import shutil

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


@contextlib.contextmanager
def claimed(
  folder: str | os.PathLike[str], experiment: Experiment, *, overwrite: bool = False
) -> Generator[pathlib.Path]:
  """Within the block the folder is this run's alone. A run of the same config is continued.

  A folder that was made for the run and is still empty when the block ends is removed again.

  Args:
    folder: is made where there is none.
    experiment: the config.
    overwrite: what an earlier run left there (and nothing else) is removed first.

  Raises:
    ValueError: the folder holds a run of another config, or another process uses it.
  """
  path = pathlib.Path(folder)
  if path.exists() and not path.is_dir():
    raise ValueError(f"Workdir '{path}' is a file; expected a folder.")
  try:
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / _LOCK).open('w')
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
      yield path
    finally:
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

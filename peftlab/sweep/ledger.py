"""What a root was asked for, ROOT/sweep.json: every trial with its setting, config and command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import fcntl
import os
import pathlib
from typing import Any

from peftlab.formats import files
from peftlab.sweep.trials import Trial
from peftlab.train import fields
from peftlab.train.config import Experiment

FILE = 'sweep.json'
_LOCK = '.sweep.lock'
VERSION = 1

Entry = dict[str, Any]
Path = str | os.PathLike[str]


def read(root: Path) -> dict[str, Entry]:
  """{id: {'setting', 'config', 'command'}}, in the order they were asked for.

  Raises:
    ValueError: there is no sweep in `root`, or one of another version.
  """
  path = pathlib.Path(root) / FILE
  if not path.exists():
    raise ValueError(f"'{root}' holds no sweep: it has no {FILE}.")
  data = files.read_json(path)
  if data.get('version') != VERSION or not isinstance(data.get('trials'), dict):
    raise ValueError(f"'{path}' has version {data.get('version')}; this peftlab reads {VERSION}.")
  return data['trials']


def add(root: Path, trials: Iterable[Trial], commands: Mapping[str, list[str]]) -> None:
  """Adds trials to those of a root; two launchers at once lose nothing.

  Args:
    root: of the sweep, made where there is none.
    trials: what is asked for.
    commands: {id: command line}.
  """
  folder = pathlib.Path(root)
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / _LOCK).open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    known = read(folder) if (folder / FILE).exists() else {}
    for trial in trials:
      known[trial.id] = {
        'setting': trial.setting,
        'config': fields.to_dict(trial.experiment),
        'command': commands[trial.id],
      }
    files.write_json(folder / FILE, {'version': VERSION, 'trials': known})


def trials(root: Path, ids: Iterable[str] | None = None) -> list[Trial]:
  """The trials of a root, or those of some ids, in the order of the ids.

  Raises:
    ValueError: an id that the root does not know.
  """
  known = read(root)
  chosen = list(known if ids is None else ids)
  for name in chosen:
    if name not in known:
      raise ValueError(f"'{root}' has no trial {name!r}; it has {len(known)} others.")
  return [
    Trial(
      id=name,
      setting=known[name]['setting'],
      experiment=fields.from_dict(
        Experiment, known[name]['config'], subject=f'The config of trial {name}'
      ),
    )
    for name in chosen
  ]

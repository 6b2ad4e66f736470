"""Checkpoints of a run by orbax, in the background: adapter, optimizer, rng, data position."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import itertools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from peftlab import _padded, _parts, _processes
from peftlab.formats import files
from peftlab.train import fields
from peftlab.train.config import IMMATERIAL

FORMAT = 1
DAMAGED = 'damaged'  # beside the checkpoints: where damaged ones are moved
MANIFEST = 'sha256.json'
# Written by orbax while it renames a finished checkpoint.
_UNLISTED = ('_CHECKPOINT_METADATA', 'commit_success.txt')
_UNFINISHED = '*.orbax-checkpoint-tmp*'


class DamagedError(ValueError):
  """A checkpoint whose files are not as they were written."""


class Checkpoints:
  """The checkpoints of one run. Each is complete or not there at all: written aside, then renamed.

  A checkpoint holds arrays by name; `about`: the step, the data position, the config, the base's
  fingerprint, the arrays' shapes; and the SHA-256 of each of its files.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, config: dict[str, Any], base: str, keep: int = 2
  ):
    """Opens the folder; what an interrupted save left behind is cleared away.

    Args:
      folder: is made where there is none.
      config: of the run, as `fields.to_dict` gives it; a checkpoint of another is refused.
      base: the base's fingerprint; likewise.
      keep: how many checkpoints are kept, the newest.
    """
    self.folder = pathlib.Path(folder).resolve()
    self._config, self._base = config, base
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=True,
      cleanup_tmp_directories=True,
      single_host_load_and_broadcast=_processes.count() > 1,
      async_options=ocp.options.AsyncOptions(post_finalization_callback=self._write_manifest),
    )
    self._orbax = ocp.CheckpointManager(self.folder, options=options)

  def steps(self) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    return sorted(map(int, self._orbax.all_steps()))  # numpy's, where they were broadcast

  def save(self, step: int, tree: Any, *, position: dict[str, Any]) -> None:
    """Copies the arrays of `tree` and writes them in the background; nothing where it exists.

    Args:
      step: how many updates were done.
      tree: any pytree of arrays; they may be donated as soon as this returns.
      position: of the data, for JSON.
    """
    if step in self._orbax.all_steps():
      return
    # Copies: on CPU orbax would write from the very buffers that the next update reuses.
    arrays = {name: jnp.copy(a) for name, a in named_arrays(_padded.cut_tree(tree)).items()}
    about = {
      'format': FORMAT,
      'step': step,
      'position': position,
      'config': self._config,
      'base': self._base,
      'arrays': {name: describe(array) for name, array in arrays.items()},
    }
    items = {'arrays': ocp.args.StandardSave(arrays), 'about': ocp.args.JsonSave(about)}
    self._orbax.save(step, args=ocp.args.Composite(**items))

  def restore(self, tree: Any, *, step: int | None = None) -> tuple[Any, dict[str, Any]]:
    """The newest checkpoint, or that of `step`, as (a tree like `tree`, its `about`).

    Args:
      tree: says the structure, and where each array goes, padded or not; any mesh will do.
      step: one of `steps()`.

    Raises:
      DamagedError: its files are not as they were written.
      ValueError: it is sound, but of another config or base; the message names it.
    """
    step = self.steps()[-1] if step is None else step
    where = self.name(step)
    check_files(self.folder / str(step), where)
    items = ocp.args.Composite(about=ocp.args.JsonRestore())
    about = self._orbax.restore(step, args=items)['about']
    if about['format'] != FORMAT:
      raise ValueError(f'{where} has format {about["format"]}; this version reads {FORMAT}.')
    check_same_config(about['config'], self._config, subject=where)
    if about['base'] != self._base:
      raise ValueError(
        f'{where} was trained on another base: its fingerprint is {about["base"]}, that of this '
        f'base {self._base}.'
      )
    like = named_arrays(_padded.cut_tree(tree))
    _check_arrays(about['arrays'], like, where)
    shapes = {
      name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in like.items()
    }
    items = ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes))
    found = _unnamed(_padded.cut_tree(tree), self._orbax.restore(step, args=items)['arrays'])
    return _padded.place_tree(found, tree), about

  def name(self, step: int) -> str:
    """What messages call a checkpoint."""
    return f"Checkpoint '{self.folder / str(step)}'"

  def set_aside(self, step: int) -> pathlib.Path:
    """Moves one checkpoint, whole, to a folder beside them; nothing is removed."""
    target = pathlib.Path(_processes.by_first(lambda: str(self._move_aside(step))))
    self._orbax.reload()
    return target

  def _move_aside(self, step: int) -> pathlib.Path:
    aside = self.folder.parent / DAMAGED
    aside.mkdir(exist_ok=True)
    numbers = itertools.count(2)
    target = aside / str(step)
    while target.exists():
      target = aside / f'{step}-{next(numbers)}'
    (self.folder / str(step)).rename(target)
    return target

  def close(self) -> None:
    """Waits for what is being written; an error in the background is raised here."""
    self._orbax.wait_until_finished()
    self._orbax.close()

  def _write_manifest(self) -> None:
    """Lists the files of a checkpoint that is written out and about to be renamed."""
    for folder in self.folder.glob(_UNFINISHED):
      listed = {
        str(path.relative_to(folder)): _sha256(path)
        for path in sorted(folder.rglob('*'))
        if path.is_file() and path.name not in _UNLISTED
      }
      files.write_json(folder / MANIFEST, listed)


def check_files(folder: pathlib.Path, where: str) -> None:
  """Raises DamagedError unless every file of a checkpoint is as it was written."""
  try:
    listed = files.read_json(folder / MANIFEST)
  except ValueError as error:
    raise DamagedError(f'{where} is damaged: {error}') from error
  for name, expected in listed.items():
    path = folder / name
    if not path.is_file() or _sha256(path) != expected:
      state = 'not as it was written' if path.is_file() else 'gone'
      raise DamagedError(f'{where} is damaged: its file {name} is {state}.')


def _sha256(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def describe(array: jax.Array) -> str:
  """'float32[3,8]'."""
  return f'{array.dtype}[{",".join(map(str, array.shape))}]'


def _check_arrays(saved: dict[str, str], like: Mapping[str, jax.Array], where: str) -> None:
  for name in dict.fromkeys([*saved, *like]):
    there, here = saved.get(name, 'nothing'), describe(like[name]) if name in like else 'nothing'
    if there != here:
      raise ValueError(f'{where} holds {there} for {name}; expected {here}.')


def check_same_config(saved: dict[str, Any], now: dict[str, Any], *, subject: str) -> None:
  """Raises ValueError, naming the fields that differ, unless two configs make the same run."""
  names = [name for name in fields.differences(saved, now) if name not in IMMATERIAL]
  if names:
    told = ', '.join(f'{n} ({_at(saved, n)} there, {_at(now, n)} here)' for n in names[:6])
    more = f' and {len(names) - 6} more' if len(names) > 6 else ''
    raise ValueError(f'{subject} is of another config, which differs in {told}{more}.')


def _at(config: Any, name: str) -> str:
  for key in name.split('.'):
    config = config.get(key, 'none') if isinstance(config, dict) else 'none'
  return str(config) or "''"


def named_arrays(tree: Any) -> dict[str, jax.Array]:
  """{name: array} of a pytree; a typed key as its data."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): _data(leaf)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def _data(array: jax.Array) -> jax.Array:
  return jax.random.key_data(array) if _parts.is_key(array) else array


def _unnamed(tree: Any, arrays: Mapping[str, jax.Array]) -> Any:
  """Inverse of `named_arrays`, for the structure and the placement of `tree`."""
  leaves, structure = jax.tree.flatten(tree)
  back = []
  for leaf, array in zip(leaves, (arrays[name] for name in named_arrays(tree)), strict=True):
    if _parts.is_key(leaf):
      array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    back.append(jax.device_put(array, leaf.sharding))
  return jax.tree.unflatten(structure, back)

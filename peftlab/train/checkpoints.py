"""Checkpoints of a run by orbax, in the background: adapter, optimizer, rng, data position."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from peftlab.train import fields

FORMAT = 1
Arrays = Mapping[str, jax.Array]

# What reading a damaged file can raise, in orbax and in what it stands on.
_DAMAGE = (ValueError, OSError, KeyError, TypeError, RuntimeError)


class Checkpoints:
  """The checkpoints of one run. Each is complete or not there at all: written aside, then renamed.

  A checkpoint holds arrays by name, and `about`: the step, the data position, the config, the
  base's fingerprint and a SHA-256 of the arrays.
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
      max_to_keep=keep, create=True, cleanup_tmp_directories=True
    )
    self._orbax = ocp.CheckpointManager(self.folder, options=options)

  def steps(self) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    return sorted(self._orbax.all_steps())

  def save(self, step: int, tree: Any, *, position: dict[str, Any]) -> None:
    """Copies the arrays of `tree` and writes them in the background; nothing where it exists.

    Args:
      step: how many updates were done.
      tree: any pytree of arrays; they may be donated as soon as this returns.
      position: of the data, for JSON.
    """
    if step in self._orbax.all_steps():
      return
    arrays = named_arrays(tree)
    about = {
      'format': FORMAT,
      'step': step,
      'position': position,
      'config': self._config,
      'base': self._base,
      'digest': digest(arrays),
    }
    items = {'arrays': ocp.args.StandardSave(arrays), 'about': ocp.args.JsonSave(about)}
    self._orbax.save(step, args=ocp.args.Composite(**items))

  def restore(self, tree: Any, *, step: int | None = None) -> tuple[Any, dict[str, Any]]:
    """The newest checkpoint, or that of `step`, as (a tree like `tree`, its `about`).

    Args:
      tree: says the structure, and where each array goes; any mesh will do.
      step: one of `steps()`.

    Raises:
      ValueError: it is damaged, or of another config or base; the message names it.
    """
    step = self.steps()[-1] if step is None else step
    where = f"Checkpoint '{self.folder / str(step)}'"
    about = self._about(step, where)
    check_same_config(about['config'], self._config, subject=where)
    if about['base'] != self._base:
      raise ValueError(
        f'{where} was trained on another base: its fingerprint is {about["base"]}, that of this '
        f'base {self._base}.'
      )
    like = named_arrays(tree)
    arrays = self._arrays(step, like, where)
    if digest(arrays) != about['digest']:
      raise ValueError(f'{where} is damaged: its arrays are not those that were saved.')
    return _unnamed(tree, arrays), about

  def delete(self, step: int) -> None:
    """Removes one checkpoint."""
    self._orbax.delete(step)

  def close(self) -> None:
    """Waits for what is being written; an error in the background is raised here."""
    self._orbax.wait_until_finished()
    self._orbax.close()

  def _about(self, step: int, where: str) -> dict[str, Any]:
    try:
      items = ocp.args.Composite(about=ocp.args.JsonRestore())
      about = self._orbax.restore(step, args=items)['about']
    except _DAMAGE as error:
      raise ValueError(f'{where} is damaged: {_line(error)}') from error
    keys = {'format', 'step', 'position', 'config', 'base', 'digest'}
    if not isinstance(about, dict) or set(about) != keys or about['step'] != step:
      raise ValueError(f'{where} is damaged: its description is not that of step {step}.')
    if about['format'] != FORMAT:
      raise ValueError(f'{where} has format {about["format"]}; this version reads {FORMAT}.')
    return about

  def _arrays(self, step: int, like: dict[str, jax.Array], where: str) -> dict[str, jax.Array]:
    shapes = {
      name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in like.items()
    }
    try:
      items = ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes))
      found = dict(self._orbax.restore(step, args=items)['arrays'])
    except _DAMAGE as error:
      raise ValueError(f'{where} is damaged: {_line(error)}') from error
    for name, array in like.items():
      if found[name].shape != array.shape or found[name].dtype != array.dtype:
        raise ValueError(
          f'{where} has {name} of {found[name].dtype}{list(found[name].shape)}; expected '
          f'{array.dtype}{list(array.shape)}.'
        )
    return found


def check_same_config(saved: dict[str, Any], now: dict[str, Any], *, subject: str) -> None:
  """Raises ValueError, naming the fields that differ, unless two configs are the same."""
  names = fields.differences(saved, now)
  if names:
    told = ', '.join(f'{n} ({_at(saved, n)} there, {_at(now, n)} here)' for n in names[:6])
    more = f' and {len(names) - 6} more' if len(names) > 6 else ''
    raise ValueError(f'{subject} is of another config, which differs in {told}{more}.')


def _at(config: Any, name: str) -> str:
  for key in name.split('.'):
    config = config.get(key, 'none') if isinstance(config, dict) else 'none'
  return str(config)


def named_arrays(tree: Any) -> dict[str, jax.Array]:
  """{name: array} of a pytree; a typed key as its data."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): _data(leaf)
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def _is_key(array: jax.Array) -> bool:
  return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _data(array: jax.Array) -> jax.Array:
  return jax.random.key_data(array) if _is_key(array) else array


def _unnamed(tree: Any, arrays: Mapping[str, jax.Array]) -> Any:
  """Inverse of `named_arrays`, for the structure and the placement of `tree`."""
  leaves, structure = jax.tree.flatten(tree)
  back = []
  for leaf, array in zip(leaves, (arrays[name] for name in named_arrays(tree)), strict=True):
    if _is_key(leaf):
      array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    back.append(jax.device_put(array, leaf.sharding))
  return jax.tree.unflatten(structure, back)


def digest(arrays: Arrays) -> str:
  """SHA-256 of the names, shapes, dtypes and bytes of some arrays."""
  result = hashlib.sha256()
  for name, array in sorted(arrays.items()):
    result.update(f'{name} {array.dtype} {tuple(array.shape)}\n'.encode())
    result.update(np.ascontiguousarray(array).tobytes())
  return result.hexdigest()


def _line(error: Exception) -> str:
  """The first line of an error's message, as a sentence."""
  text = (str(error).strip() or type(error).__name__).splitlines()[0]
  return text[:300].rstrip('.') + '.'

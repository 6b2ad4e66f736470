"""Writes a decoder as a Hugging Face folder: config.json, safetensors, what else belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
import os
import pathlib
import shutil
from typing import Any, cast

from flax import nnx
import jax.numpy as jnp
import numpy as np

from peftlab import _packed, _parts, _registry, _stack, quant
from peftlab.formats.hf_views import PlainView
from peftlab.formats.hf_weights import HfWeights
from peftlab.formats.safetensors_file import write_safetensors
from peftlab.models import decoder, weights
from peftlab.models.config import DTYPES, check_choice

# Beside the weights: how text becomes tokens, how to generate.
CARRIED = (
  '*token*.json',
  'chat_template*',
  'generation_config.json',
  'merges.txt',
  '*processor_config.json',
  'tokenizer.model',
  'vocab.json',
)
SHARD_BYTES = 5 * 10**9


def write_model(
  model: decoder.Decoder,
  folder: str | os.PathLike[str],
  *,
  source: str | os.PathLike[str],
  dtype: str | None = None,
  shard_bytes: int = SHARD_BYTES,
  dequantize: bool = False,
) -> pathlib.Path:
  """Writes a model under the names of its family, so that transformers can read it.

  A weight that was not changed since it was loaded in float32 is written bit by bit as it was,
  also where it is a code (mxfp4, fp8) in the source. Where weights are no codes any more, all of
  them are written in the dtype `dtype`, or bfloat16, and the config says so. What the model does
  not hold (a vision tower) is carried over.

  Args:
    model: with all adapters merged into its weights or detached.
    folder: a new or empty folder.
    source: the HF folder that the model was loaded from, or one of the same config.
    dtype: of the weights; None: that of the source's.
    shard_bytes: a file holds no more tensors than that, but at least one; where one is not enough
      there are several and an index.
    dequantize: whether weights that are quantized here are written as the numbers that their codes
      stand for; else they are refused.

  Returns:
    The folder.

  Raises:
    ValueError: the model has adapters, quantized weights or no HF form, the source is of another
      config, the folder is not empty.
  """
  if any(isinstance(v, nnx.LoRAParam) for v in _parts.variables(model).values()):
    raise ValueError('The model has adapters; merge them into its weights or detach them first.')
  packed = [p for p, v in _parts.variables(model).items() if _is_packed(v)]
  if packed and not dequantize:
    names = ', '.join(_parts.path_name(path[:-1]) for path in packed[:3])
    more = f' and {len(packed) - 3} more' if len(packed) > 3 else ''
    raise ValueError(
      f'The model has quantized weights ({names}{more}), and a Hugging Face folder holds numbers; '
      'expected write_model(..., dequantize=True), or the command `peftlab export`, which merges '
      'into the base as it was.'
    )
  if dtype is not None:
    check_choice('dtype', dtype, DTYPES)
  if shard_bytes < 1:
    raise ValueError(f'shard_bytes is {shard_bytes}; it must be at least 1.')
  folder = _new_folder(folder)
  if packed:
    model = cast(decoder.Decoder, quant.dequantize(model))
  tensors = _Tensors(model, HfWeights(source), dtype)
  _write_config(model, tensors, folder / 'config.json')
  _write_shards(tensors, folder, shard_bytes)
  for pattern in CARRIED:
    for path in pathlib.Path(source).glob(pattern):
      shutil.copyfile(path, folder / path.name)
  return folder


def _is_packed(variable: nnx.Variable) -> bool:
  return isinstance(variable.get_raw_value(), _packed.Packed)


def _new_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
  path = pathlib.Path(folder)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(f"'{path}' exists and is not an empty folder.")
  path.mkdir(parents=True, exist_ok=True)
  return path


class _Tensors(Mapping[str, np.ndarray]):
  """What the folder will hold, name -> array, each made when it is asked for."""

  def __init__(self, model: decoder.Decoder, source: HfWeights, dtype: str | None):
    family = _registry.families.get(model.config.family)
    if 'hf' not in family.formats:
      raise ValueError(f'The family {model.config.family!r} has no Hugging Face form.')
    form = family.formats['hf']
    self.view: PlainView = form.view(source)
    self._source, self._dtype = source, dtype
    given = decoder.constants(model.config)
    targets = weights.plan(model, form.weights, model.config, given=given)
    self._places = {n: (t, index) for t in targets for index, n in t.names.items()}
    _check(self._places, self.view, source, untied=not model.tied)
    self._arrays = _parts.variables(model)
    self._orders = {t.path: _stack.order_at(model, t.path[:-1]) for t in targets}
    coded = [n for n in self._places if self.view.is_coded(n)]
    # Codes are kept where every weight still is one; the config tells only of all or none.
    self.coded = all(self.view.stored(n, self._array(n)) is not None for n in coded)
    parts = self.view.parts if self.coded else lambda name: (name,)
    # Name in the folder -> name in the model.
    self._names = {part: name for name in self._places for part in parts(name)}
    claimed = {part for name in self._places for part in self.view.parts(name)}
    self._carried = [name for name in source if name not in claimed]

  def _array(self, name: str) -> np.ndarray:
    """The array of the model in the place of the family's tensor `name`."""
    target, index = self._places[name]
    order = self._orders[target.path]
    place = index if order is None or not index else (order.index(index[0]), *index[1:])
    return target.unturn(np.asarray(self._arrays[target.path].get_raw_value()[place]))

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self._names:
      return self._source[name]
    ours = self._names[name]
    array, coded = self._array(ours), self.view.is_coded(ours)
    if coded and self.coded:
      stored = self.view.stored(ours, array)
      assert stored is not None
      return stored[name]
    told = None if coded else self._source.tensors.get(name)
    return array.astype(jnp.dtype(self._dtype or ('bfloat16' if told is None else told.dtype)))

  def __iter__(self) -> Iterator[str]:
    yield from self._names
    yield from self._carried

  def __len__(self) -> int:
    return len(self._names) + len(self._carried)


def _check(places: Mapping[str, Any], view: PlainView, source: HfWeights, *, untied: bool) -> None:
  """Raises ValueError where the source has other tensors than the model."""
  for name, (target, _) in places.items():
    if name not in view.tensors:
      if untied and target.path[0] == 'head':
        continue
      near = _registry.did_you_mean(name, view.tensors)
      raise ValueError(f"'{source.directory}' has no tensor {name!r}{near or '.'}")
    shape = tuple(view.tensors[name].shape)
    if shape != target.file_shape:
      raise ValueError(
        f"'{source.directory}' has tensor {name!r} of shape {shape}; the model's is "
        f'{target.file_shape}.'
      )


def _write_config(model: decoder.Decoder, tensors: _Tensors, path: pathlib.Path) -> None:
  source = tensors.view.directory / 'config.json'
  config = json.loads(source.read_text())
  changed = dict(config)
  if not tensors.coded:
    changed.pop('quantization_config', None)
  if not model.tied and 'lm_head.weight' not in tensors.view.tensors:
    changed['tie_word_embeddings'] = False
    if isinstance(changed.get('text_config'), dict):
      changed['text_config'] = changed['text_config'] | {'tie_word_embeddings': False}
  if changed == config:
    shutil.copyfile(source, path)
  else:
    path.write_text(json.dumps(changed, indent=2) + '\n')


def _write_shards(tensors: _Tensors, folder: pathlib.Path, shard_bytes: int) -> None:
  shards: list[list[str]] = [[]]
  total = held = 0
  for name in tensors:
    size = tensors[name].nbytes
    if shards[-1] and held + size > shard_bytes:
      shards.append([])
      held = 0
    shards[-1].append(name)
    held, total = held + size, total + size
  metadata = {'format': 'pt'}
  if len(shards) == 1:
    write_safetensors(folder / 'model.safetensors', tensors, metadata=metadata)
    return
  where = {}
  for number, shard in enumerate(shards, start=1):
    file = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    write_safetensors(folder / file, _Some(tensors, shard), metadata=metadata)
    where |= dict.fromkeys(shard, file)
  index = {'metadata': {'total_size': total}, 'weight_map': dict(sorted(where.items()))}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index, indent=2) + '\n')


class _Some(Mapping[str, np.ndarray]):
  """Some of the tensors of a mapping."""

  def __init__(self, tensors: Mapping[str, np.ndarray], names: list[str]):
    self._tensors, self._names = tensors, names

  def __getitem__(self, name: str) -> np.ndarray:
    return self._tensors[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)

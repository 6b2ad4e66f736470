"""LoRA factors as MaxText and Tunix keep them, brought into Hugging Face's names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import os
import pathlib
import re
from typing import Any
import warnings

import ml_dtypes
import numpy as np

from peftlab import _registry
from peftlab.formats import files, layer_names, safetensors_file

Words = tuple[str, ...]
Factors = tuple[np.ndarray, np.ndarray]

_FACTOR = re.compile(r'(?:(?:kernel|w|weight|embedding)_)?lora_([ab])', re.IGNORECASE)
_NUMBER = re.compile(r'(?:[a-z_]*layers?_)?(\d+)')
_WRAPPERS = ('value', 'kernel', 'weight')  # behind the name of a factor
# The last word of a module there -> here.
_MODULES = {
  'query': 'q',
  'key': 'k',
  'value': 'v',
  'out': 'o',
  'wi_0': 'gate',
  'wi_1': 'up',
  'wo': 'down',
  'q_proj': 'q',
  'k_proj': 'k',
  'v_proj': 'v',
  'o_proj': 'o',
  'q_einsum': 'q',
  'attn_vec_einsum': 'o',
  'gate_proj': 'gate',
  'up_proj': 'up',
  'down_proj': 'down',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """How a trainer lays out what it shares with Hugging Face.

  Attributes:
    axis: of the layers, where they are stacked: that of the kernel's factors.
    scaled: families whose query kernels are divided by sqrt(head_dim) there.
    interleaved: families whose query and key heads have the two halves of a rotation side by side.
    known: families for which this is known; None: it keeps Hugging Face's own numbers.
  """

  axis: int
  scaled: tuple[str, ...] = ()
  interleaved: tuple[str, ...] = ()
  known: tuple[str, ...] | None = None


ORIGINS = {
  # https://github.com/AI-Hypercomputer/maxtext, checkpoint_conversion/utils/param_mapping.py
  'maxtext': Origin(
    axis=1,
    scaled=('llama', 'smollm2', 'gemma2', 'gemma3', 'mixtral'),
    interleaved=('llama', 'smollm2'),
    known=('llama', 'smollm2', 'gemma2', 'gemma3', 'mixtral'),
  ),
  'tunix': Origin(axis=0),
}


def read_arrays(path: str | os.PathLike[str]) -> dict[Words, np.ndarray]:
  """The arrays of an .npz or .safetensors file or an Orbax folder, by the words of their paths.

  Raises:
    ValueError: another file, a folder without a checkpoint, or a pickle.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return _flat(_restored(path))
  files.existing_file(path)
  if path.suffix == '.safetensors':
    return {_words(k): a for k, a in safetensors_file.SafetensorsFile(path).items()}
  if path.suffix == '.npz':
    with np.load(path, allow_pickle=False) as held:
      return {_words(key): _numbers(held[key]) for key in held}
  files.refuse_pickle(path)
  raise ValueError(f"'{path}' is not .npz, .safetensors or the folder of an Orbax checkpoint.")


def _numbers(array: np.ndarray) -> np.ndarray:
  """numpy writes bfloat16 as two bytes without a meaning."""
  return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype('V2') else array


def _words(key: str) -> Words:
  return tuple(word for word in re.split(r"[./\[\]']+", key) if word)


def _restored(folder: pathlib.Path) -> Any:
  """The tree of an Orbax checkpoint, which may lie in the only item of a folder."""
  inside = [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]
  found = next((p for p in inside if (p / '_METADATA').is_file()), None)
  if found is None:
    raise ValueError(f"Folder '{folder}' holds no Orbax checkpoint (no _METADATA).")
  import orbax.checkpoint as ocp

  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # that the sharding is taken from the file
    return ocp.PyTreeCheckpointer().restore(found.resolve())


def _flat(tree: Any, path: Words = ()) -> dict[Words, np.ndarray]:
  if isinstance(tree, Mapping):
    items: Iterator[tuple[Any, Any]] = iter(tree.items())
  elif isinstance(tree, list | tuple):
    items = iter(enumerate(tree))
  else:
    return {} if tree is None else {path: np.asarray(tree)}
  found: dict[Words, np.ndarray] = {}
  for key, value in items:
    found |= _flat(value, (*path, str(key)))
  return found


def factors(
  model: Any, arrays: Mapping[Words, np.ndarray], origin: Origin, *, subject: str
) -> dict[str, Factors]:
  """{layer: (a [in, rank], b [rank, out])} of all LoRA factors among some arrays.

  Wrappers (`params`, a trailing `value`) are skipped; `0`, `layers_0` and `layers.0` are one; a
  stack of layers is taken apart.

  Args:
    model: the base, as this library has it.
    arrays: as `read_arrays` gives them; those that are no factors are left aside.
    origin: of whom.
    subject: the start of every message.

  Raises:
    ValueError: no factors, A without B, a module or a layer that the model does not have, shapes
      that do not fit it, or a family whose numbers are laid out in a way that is not known.
  """
  family = model.config.family
  if origin.known is not None and family not in origin.known:
    raise ValueError(
      f'{subject}: how query and key heads of the family {family!r} lie there is not known; known '
      f'are {", ".join(origin.known)}.'
    )
  pairs = _pairs(arrays, subject)
  known = layer_names.places(model)
  found: dict[str, Factors] = {}
  for (module, number), pair in pairs.items():
    if set(pair) != {'a', 'b'}:
      raise ValueError(f'{subject}: {".".join(module)} has lora_{min(pair)} alone.')
    places = _places(known, module, number, subject)
    shown = '.'.join(module)
    for place, a, b in _each(places, pair, origin.axis, number is None, f'{subject}: {shown}'):
      b = _as_theirs(b, place.site.path[-1], model.config, origin)
      found[place.hf_name or place.name] = a, b
  return found


def _pairs(
  arrays: Mapping[Words, np.ndarray], subject: str
) -> dict[tuple[Words, int | None], dict[str, np.ndarray]]:
  """{(words of a module, its layer or None): {'a': array, 'b': array}}."""
  pairs: dict[tuple[Words, int | None], dict[str, np.ndarray]] = {}
  for words, array in arrays.items():
    own = list(words)
    while own and own[-1] in _WRAPPERS and not _FACTOR.fullmatch(own[-1]):
      own.pop()
    match = _FACTOR.fullmatch(own[-1]) if own else None
    if match is None:
      continue
    numbers = [n for word in own[:-1] if (n := _NUMBER.fullmatch(word))]
    if len(numbers) > 1:
      raise ValueError(f'{subject}: {".".join(words)} has more than one layer number.')
    module = tuple(word for word in own[:-1] if not _NUMBER.fullmatch(word))
    number = int(numbers[0][1]) if numbers else None
    pairs.setdefault((module, number), {})[match[1].lower()] = array
  if not pairs:
    shown = ', '.join('.'.join(words) for words in list(arrays)[:3])
    raise ValueError(f'{subject} has no LoRA factors among {len(arrays)} arrays ({shown}, ...).')
  return pairs


def _places(
  known: dict[layer_names.Key, layer_names.Place], module: Words, number: int | None, subject: str
) -> list[layer_names.Place]:
  """The layers of the model that a module means, in the order of their numbers."""
  word = _MODULES.get(module[-1], module[-1]) if module else ''
  named = {key: place for key, place in known.items() if key[0][-1] == word}
  if not named:
    near = _registry.did_you_mean(word, {key[0][-1] for key in known})
    raise ValueError(f'{subject}: the model has no layer {".".join(module)!r}{near or "."}')
  if number is None:
    return [named[key] for key in sorted(named, key=lambda key: key[1])]
  found = [place for key, place in named.items() if key[1] == (number,)]
  if len(found) != 1:
    raise ValueError(f'{subject}: the model has {len(found)} layers {word!r} of number {number}.')
  return found


def _each(
  places: list[layer_names.Place],
  pair: Mapping[str, np.ndarray],
  axis: int,
  stacked: bool,
  subject: str,
) -> Iterator[tuple[layer_names.Place, np.ndarray, np.ndarray]]:
  """(layer, a [in, rank], b [rank, out])."""
  a, b = pair['a'], pair['b']
  if stacked and len(places) > 1:
    if {a.shape[axis], b.shape[axis]} != {len(places)}:
      raise ValueError(
        f'{subject} has factors {a.shape} and {b.shape}; expected {len(places)} layers along axis '
        f'{axis}.'
      )
    a, b = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
  else:
    a, b = a[None], b[None]
  for place, one, other in zip(places, a, b, strict=True):
    sizes, rank = place.site.sizes, one.shape[-1]
    if one.size != sizes['in'] * rank or other.size != rank * sizes['out']:
      raise ValueError(
        f'{subject} has factors {one.shape} and {other.shape} for {place.name}, a kernel '
        f'[in {sizes["in"]}, out {sizes["out"]}].'
      )
    yield place, one.reshape(sizes['in'], rank), other.reshape(rank, sizes['out'])


def _as_theirs(b: np.ndarray, word: Any, config: Any, origin: Origin) -> np.ndarray:
  """b [rank, out] of a trainer -> as Hugging Face's kernels have it."""
  if word == 'q' and config.family in origin.scaled:
    b = (b.astype(np.float32) * np.float32(config.head_dim**0.5)).astype(b.dtype)
  if word in ('q', 'k') and config.family in origin.interleaved:
    pairs = b.reshape(b.shape[0], -1, config.head_dim // 2, 2)
    b = np.swapaxes(pairs, -1, -2).reshape(b.shape)
  return b

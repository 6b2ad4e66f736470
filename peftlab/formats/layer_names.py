"""Names of single layers on disk: per layer whether stacked or not, one canonical form."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import itertools
import re
from typing import Any

from flax import nnx
import numpy as np

from peftlab import _layer, _registry, _sites

Key = tuple[tuple[str, ...], tuple[int, ...]]


def canonical(name: str) -> Key:
  """The words and the layer numbers of a dotted name, in their order.

  `layers.3.q`, `layers_3.q`, `params.layers.3.q` and `q` of layer 3 in a stack `layers` are one:
  (('layers', 'q'), (3,)).
  """
  words: list[str] = []
  numbers: list[int] = []
  for part in name.split('.'):
    match = re.fullmatch(r'(.*?[^\d_])_?(\d+)', part) if '_' in part else None
    if part.isdigit():
      numbers.append(int(part))
    elif match and part.endswith('_' + match[2]):
      words.append(match[1])
      numbers.append(int(match[2]))
    else:
      words.append(part)
  if words[:1] == ['params']:
    words = words[1:]
  return tuple(words), tuple(numbers)


@dataclasses.dataclass(frozen=True)
class Place:
  """One layer of a model.

  Attributes:
    site: where it is, perhaps in a stack.
    index: which layer of the stack, one number per stack axis; of experts that share their arrays
      none.
    name: its dotted name, with its numbers behind the first word.
    hf_name: its name in Hugging Face files, or None.
  """

  site: _sites.Site
  index: tuple[int, ...]
  name: str
  hf_name: str | None


def places(model: nnx.Module, *, one: bool = False) -> dict[Key, Place]:
  """Every layer of a model that can be adapted, by its canonical name.

  Args:
    model: any.
    one: of a layer with experts also the one place of all of them, besides one for each.
  """
  hf = getattr(model, 'hf_names', dict)()
  by_key = {canonical(own): theirs for own, theirs in hf.items()}
  name_of = getattr(model, 'layer_name', _name)  # a model may know its layers by other numbers
  found = {}
  every = _sites.sites(model, norms=True, points=True)
  every += [dataclasses.replace(s, one=True) for s in every if one and s.experts]
  for site in every:
    for number, index in _numbered(site):
      name = name_of(site.path, number)
      key = canonical(name)
      found[key] = Place(site, index, name, by_key.get(key))
  return found


def adapted(model: nnx.Module, name: str) -> list[tuple[Place, _layer.Attached]]:
  """The places of an adapter of a model, and what each carries."""
  found = []
  for place in places(model, one=True).values():
    attached = next((a for a in getattr(place.site.layer, 'adapters', ()) if a.name == name), None)
    if attached is not None and attached.one == place.site.one:
      found.append((place, attached))
  return found


def _numbered(site: _sites.Site) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
  """(its numbers, its places along the stack axes) of each layer at a site, in layer order."""
  numbers = site.own_numbers
  places = itertools.product(*(range(n) for n in site.own_layers))
  pairs = ((tuple(n[i] for n, i in zip(numbers, at, strict=True)), at) for at in places)
  return sorted(pair for pair in pairs if min(pair[0], default=0) >= 0)


def find(known: dict[Key, Place], name: str) -> Place:
  """The layer that a name in a file means: our own name of it, or Hugging Face's.

  Raises:
    ValueError: no such layer; the message has the nearest one.
  """
  place = known.get(canonical(name))
  if place is not None:
    return place
  place = next((p for p in known.values() if p.hf_name == name), None)
  if place is not None:
    return place
  names = [p.name for p in known.values()] + [p.hf_name for p in known.values() if p.hf_name]
  near = _registry.did_you_mean(name, names)
  raise ValueError(f'The model has no layer {name!r}{near or "."}')


def _name(path: tuple, index: tuple[int, ...]) -> str:
  parts = [str(part) for part in path]
  at = next((i for i, part in enumerate(path) if isinstance(part, str)), -1) + 1
  return '.'.join([*parts[:at], *(str(i) for i in index), *parts[at:]])


def take(array: np.ndarray, stack: tuple[int, ...], index: tuple[int, ...]) -> np.ndarray:
  """The array of one layer of a stack."""
  return np.moveaxis(array, stack, range(len(stack)))[index]


def put_together(
  each: dict[tuple[int, ...], np.ndarray],
  stack: tuple[int, ...],
  layers: tuple[int, ...],
  start: np.ndarray | None = None,
) -> np.ndarray:
  """{index: array of one layer} -> the stacked array: inverse of `take`.

  Layers that are not given are those of the stacked array `start`, else 0.
  """
  first = next(iter(each.values()))
  whole = np.zeros((*layers, *first.shape), first.dtype)
  if start is not None:
    whole = np.moveaxis(start, stack, range(len(stack))).copy()
  for index, array in each.items():
    whole[index] = array
  return np.moveaxis(whole, range(len(stack)), stack)


def by_site(layers: dict[Key, Any], known: dict[Key, Place]) -> Iterator[tuple[_sites.Site, dict]]:
  """Groups what is given per layer by site, as {index: value}."""
  grouped: dict[tuple, tuple[_sites.Site, dict]] = {}
  for key, value in layers.items():
    place = known[key]
    grouped.setdefault(place.site.path, (place.site, {}))[1][place.index] = value
  yield from grouped.values()

"""A pool of adapters on one base, of which every row of a batch may use another."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
import os
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _adapter, _attach, _layer, _parts, _registry, _rows, _sites
from peftlab.formats import adapter_folder
from peftlab.serve import banks

RANKS = (4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class _Resident:
  """Where one adapter lies: in which bank, at which place."""

  bank: banks.Key
  place: int


class Pool:
  """Adapters that wait on the device beside one base; batches mix them freely.

      pool = Pool(base, capacity=64)
      pool.add('poems', 'runs/poems')
      serve.generate(pool.rows(['poems', None]), prompts)

  Adapters of one type, on the same layers and of ranks that round up to the same one of `ranks`
  share a bank: arrays with room for `capacity` of them. Adding writes into the bank, in place;
  evicting frees a place. Neither compiles anything once the bank is there; the base is not touched.

  Attributes:
    model: the base, without adapters; never changed.
    capacity: how many adapters a bank has room for.
    ranks: to which ranks are rounded up; zeros fill the rest. A type that does not bear that, or of
      a higher rank, has a bank of its own.
  """

  def __init__(self, model: nnx.Module, *, capacity: int = 64, ranks: Sequence[int] = RANKS):
    """An empty pool.

    Raises:
      ValueError: the model has adapters, or a capacity or a rank is below 1.
    """
    if not isinstance(model, nnx.Module):
      raise ValueError(f'The base of a pool is a {type(model).__name__}; expected an nnx.Module.')
    if _attach.names(model):
      have = ', '.join(_attach.names(model))
      raise ValueError(f'The model of a pool has adapters ({have}); detach them first.')
    if not all(isinstance(n, int) and n >= 1 for n in (capacity, *ranks)):
      raise ValueError(
        f'capacity is {capacity!r}, ranks {tuple(ranks)}; each must be at least 1, a whole number.'
      )
    self.model, self.capacity, self.ranks = model, capacity, tuple(sorted(ranks))
    self._sites = {s.path: s for s in _sites.sites(model, norms=True, points=True)}
    self._banks: dict[banks.Key, banks.Bank] = {}
    self._residents: dict[str, _Resident] = {}

  @property
  def names(self) -> tuple[str, ...]:
    """The adapters, in the order they were added."""
    return tuple(self._residents)

  def add(
    self,
    name: str,
    source: nnx.Module | str | os.PathLike[str],
    *,
    of: str = 'default',
    any_base: bool = False,
  ) -> None:
    """Puts an adapter into the pool.

    Args:
      name: by which rows ask for it.
      source: a folder of an adapter, or a model that carries it, on this base.
      of: its name in that model.
      any_base: accept an adapter that was made on another base.

    Raises:
      ValueError: the name is taken, the bank is full, the adapter is of another base, holds NaN or
        infinity, or is of a type that rows cannot have each their own of. The pool is as before.
    """
    if name in self._residents:
      raise ValueError(f'The pool already has an adapter {name!r}; evict it first.')
    _attach.check_name(name)
    if not isinstance(source, nnx.Module):
      source = adapter_folder.load_adapter(self.model, source, name=of, any_base=any_base)
      any_base = True  # `load_adapter` has compared it
    _attach.require(source, of)
    attached = _found(source, of)
    for path, one in attached.items():
      self._check(path, one)
    if not any_base:
      _check_base(self.model, source)
    arrays = {path: banks.host_arrays(self._sites[path], one) for path, one in attached.items()}
    for path, slots in arrays.items():
      _check_arrays(slots, attached[path], self._sites[path])
    rounded = {p: banks.round_up(one.adapter, self.ranks) for p, one in attached.items()}
    key = banks.Key(tuple(rounded.items()))
    bank = self._banks.get(key) or banks.Bank.empty(key, self._sites, attached, self.capacity)
    place = bank.free()
    if place is None:
      used = ', '.join(n for n, r in self._residents.items() if r.bank == key)
      raise ValueError(f'The bank of {name!r} has room for {self.capacity}; evict one of: {used}.')
    self._banks[key] = bank.put(place, arrays)
    self._residents[name] = _Resident(key, place)

  def evict(self, name: str) -> None:
    """Frees the place of an adapter.

    Raises:
      ValueError: the pool has no such adapter.
    """
    where = self._find(name)
    self._banks[where.bank] = self._banks[where.bank].cleared(where.place)
    del self._residents[name]

  def rows(self, names: Sequence[str | None]) -> nnx.Module:
    """A model for a batch whose row i has the adapter `names[i]`; None: the base.

    It holds the arrays of the base and of the banks, not copies; it is of no use any more once an
    adapter is added, which writes into them. Batches of one size run the same compiled program,
    whatever their names and whatever the pool holds, until it gets a new bank.

    Raises:
      ValueError: no rows, or a name that the pool does not have.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not len(names):
      raise ValueError(f'rows is {names!r}; expected a name or None for each row, at least one.')
    chosen = [None if name is None else self._find(name) for name in names]
    model = _parts.merge(_parts.split(self.model))
    added: dict[tuple, list[_rows.Bank]] = {}
    chunk = len(names) if len(self._banks) < 2 else -(-len(names) // len(self._banks))
    for key, bank in self._banks.items():
      plan = _plan([r.place if r and r.bank == key else _rows.NONE for r in chosen], chunk)
      for path, adapter in key.adapters:
        added.setdefault(path, []).append(bank.at(path, adapter, self._sites[path], plan))
    for site in _sites.sites(model, norms=True):
      if site.path in added:
        layer: Any = site.layer
        layer.__class__ = _layer.adapted_class(type(layer))
        layer.adapters = nnx.List(added[site.path])
    return model

  def nbytes(self) -> int:
    """Bytes of the banks, full or not."""
    return sum(bank.nbytes() for bank in self._banks.values())

  def table(self) -> str:
    """The banks as text: type, rank, adapters, bytes, and how much of them is padding."""
    lines = ['type             rank  adapters    MB']
    for key, bank in self._banks.items():
      kind = _registry.adapters.name_of(key.adapters[0][1])
      ranks = {getattr(a, 'rank', '-') for _, a in key.adapters}
      rank = ', '.join(map(str, sorted(ranks, key=str)))
      used = f'{bank.used}/{self.capacity}'
      lines.append(f'{kind:<15}  {rank:>4}  {used:>8}  {bank.nbytes() / 1e6:>6.1f}')
    return '\n'.join(lines)

  def _find(self, name: str) -> _Resident:
    if name not in self._residents:
      near = _registry.did_you_mean(name, self._residents)
      have = ', '.join(self._residents) or 'none'
      raise ValueError(f'The pool has no adapter {name!r}{near or "."} Adapters: {have}.')
    return self._residents[name]

  def _check(self, path: tuple, attached: _layer.Attached) -> None:
    name, kind = _parts.path_name(path), type(attached.adapter)
    site = self._sites.get(path)
    if site is None:
      raise ValueError(f'The base of the pool has no layer {name!r}, which the adapter adapts.')
    if not kind.mixed_batch:
      raise ValueError(f'{kind.__name__} cannot be mixed in a batch; use it alone ({name}).')
    if site.experts:
      raise ValueError(f'{name} has experts; adapters of experts cannot be mixed in a batch.')


def _check_base(model: nnx.Module, other: nnx.Module) -> None:
  """Raises ValueError where `other` lacks a base array of a model, or has other numbers there."""
  _, count, lost = _parts.shared_base(model, other)
  mine, theirs = (
    {_parts.path_name(p): a for p, a in _parts.flat(_parts.split(m).base).items()}
    for m in (model, other)
  )
  differ = [name for name in lost if not _equal(mine[name], theirs.get(name))]
  if differ:
    raise ValueError(
      f'The adapter is on another base: {len(differ)} of {count} arrays differ, {differ[0]} first; '
      'expected the base of the pool (any_base=True takes it nonetheless).'
    )


def _equal(mine: Any, theirs: Any) -> bool:
  """Whether two values, each an array or codes, hold the same numbers."""
  (one, tree), (two, other) = (jax.tree.flatten(value) for value in (mine, theirs))
  return tree == other and all(map(np.array_equal, one, two))


def _check_arrays(
  slots: dict[str, np.ndarray], attached: _layer.Attached, site: _sites.Site
) -> None:
  for name, array in slots.items():
    slot = attached.slots()[name]
    own = _adapter.slot_shape(slot, attached.adapter, sizes=site.sizes)
    if not slot.shared and array.shape != (math.prod(site.layers), *own):
      raise ValueError(
        f'The adapter has {name!r} of shape {array.shape} for {site.name}; the base of the pool '
        f'needs {(math.prod(site.layers), *own)}, layers first.'
      )
    if jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(array).all():
      raise ValueError(f'The adapter holds NaN or infinity in {name!r} of {site.name}.')


def _found(model: nnx.Module, name: str) -> dict[tuple, _layer.Attached]:
  """{path of a layer: the adapter of that name there}."""
  every = _attach.adapted(model).items()
  return {path: a for path, layer in every for a in layer.adapters if a.name == name}


def _plan(places: list[int], chunk: int) -> _rows.RowPlan:
  """What the layers are told of the rows that a bank serves."""
  of_row = np.asarray(places, np.int32)
  order = np.argsort(of_row == _rows.NONE, kind='stable').astype(np.int32)
  count = np.int32((of_row != _rows.NONE).sum())
  return _rows.RowPlan(jnp.asarray(of_row), jnp.asarray(order), jnp.asarray(count), chunk)

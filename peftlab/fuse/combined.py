"""The report of a weighted merge: per layer the rank of the result, and what was lost."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One layer, or one stack of layers.

  Attributes:
    path: of the layer.
    rank: of the new adapter there.
    lost: ||result - merge|| of each layer, Frobenius, [layers].
    size: ||merge|| of each layer, [layers].
  """

  path: str
  rank: int
  lost: np.ndarray
  size: np.ndarray

  @property
  def error(self) -> float:
    """||result - merge|| / ||merge|| of the worst layer; 0 where there is nothing."""
    return float(np.max(self.lost / np.where(self.size > 0, self.size, 1.0), initial=0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combined:
  """What `combine` did.

  Attributes:
    name: of the new adapter.
    method: how it was merged.
    weights: of the adapters.
    rows: per layer.
  """

  name: str
  method: str
  weights: Mapping[str, float]
  rows: tuple[Row, ...]

  @property
  def error(self) -> float:
    """||result - merge|| / ||merge|| over all layers together."""
    lost, size = (
      math.sqrt(sum(float(np.sum(getattr(row, n) ** 2)) for row in self.rows))
      for n in ('lost', 'size')
    )
    return lost / size if size else 0.0

  def table(self) -> str:
    """The report as text."""
    width = max(5, *(len(row.path) for row in self.rows))
    given = ', '.join(f'{w:g} {name}' for name, w in self.weights.items())
    lines = [f'{self.name} = {self.method} of {given}', f'{"layer":<{width}}  rank  error']
    lines += [f'{row.path:<{width}}  {row.rank:>4}  {row.error:.1e}' for row in self.rows]
    return '\n'.join([*lines, f'{"all":<{width}}        {self.error:.1e}'])

  def __str__(self) -> str:
    return self.table()

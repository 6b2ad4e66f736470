"""The table of what was quantized: sites, tiles, bits, specs, bytes per device, dropped axes."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from peftlab import _parts, _specs


@dataclasses.dataclass(frozen=True)
class Row:
  """One quantized weight.

  Attributes:
    path: of the layer, dotted.
    weights: numbers of the weight, over all layers.
    quantizer: its name.
    tile: inputs that share a scale.
    asked: the tile that was asked for, where 'auto' took another one.
    bits: per weight, as the arrays are: their bytes over the numbers.
    arrays: {array: its shape, dtype and spec}, as text.
    nbytes: of all arrays, unsharded.
    device_bytes: of what one device holds.
  """

  path: str
  weights: int
  quantizer: str
  tile: int
  asked: int
  bits: float
  arrays: dict[str, str]
  nbytes: int
  device_bytes: int


@dataclasses.dataclass(frozen=True)
class QuantReport:
  """What `quantize` did.

  Attributes:
    rows: one per quantized weight.
    dropped: mesh axes that do not divide a dimension of an array.
  """

  rows: tuple[Row, ...]
  dropped: tuple[_specs.Dropped, ...]

  @property
  def bits(self) -> float:
    """Bits per weight over all rows."""
    return 8 * sum(r.nbytes for r in self.rows) / max(sum(r.weights for r in self.rows), 1)

  @property
  def device_bytes(self) -> int:
    """What the quantized weights take on one device."""
    return sum(row.device_bytes for row in self.rows)

  def table(self) -> str:
    """The report as text."""
    head = ('layer', 'quantizer', 'tile', 'bits', 'bytes per device', 'arrays')
    lines = [
      (
        r.path,
        r.quantizer,
        f'{r.tile}' if r.tile == r.asked else f'{r.tile} (asked: {r.asked})',
        f'{r.bits:.3f}',
        f'{r.device_bytes:,}',
        ' '.join(f'{n} {a}' for n, a in r.arrays.items()),
      )
      for r in self.rows
    ]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    text = [
      '  '.join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
      for line in [head, *lines]
    ]
    total = sum(r.weights for r in self.rows)
    text.append(
      f'{len(self.rows)} weights of {total:,} numbers: {self.bits:.3f} bits per weight, '
      f'{self.device_bytes:,} bytes per device'
    )
    return '\n'.join([*text, *(f'dropped: {d}' for d in self.dropped)])

  __str__ = table


def row(path: str, value: Any, *, asked: int) -> Row:
  """The row of one quantized weight; `asked` is the tile that was asked for."""
  weights = math.prod(value.shape)
  nbytes = sum(_bytes(a.shape, a.dtype) for a in value.arrays.values())
  return Row(
    path=path,
    weights=weights,
    quantizer=value.form.quantizer.name,
    tile=value.form.tile,
    asked=asked or value.form.tile,
    bits=8 * nbytes / weights,
    arrays={n: _told(a) for n, a in value.arrays.items()},
    nbytes=nbytes,
    device_bytes=sum(_bytes(_piece(a), a.dtype) for a in jax.tree.leaves(value.arrays)),
  )


def _bytes(shape: Sequence[int], dtype: Any) -> int:
  return (math.prod(shape) * _parts.bits(dtype) + 7) // 8


def _piece(array: Any) -> tuple[int, ...]:
  placed = getattr(array, 'sharding', None)
  return placed.shard_shape(array.shape) if isinstance(placed, NamedSharding) else array.shape


def _told(array: jax.Array) -> str:
  placed = getattr(array, 'sharding', None)
  spec = str(placed.spec).removeprefix('PartitionSpec') if isinstance(placed, NamedSharding) else ''
  return f'{array.dtype}[{",".join(map(str, array.shape))}]{spec}'

"""The table of what was adapted: sites, shapes, specs, parameters, coverage, dropped axes."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax

from peftlab import _parts, _plan, _sites, _specs


@dataclasses.dataclass(frozen=True)
class Row:
  """One adapted layer.

  Attributes:
    path: of the layer, dotted.
    layers: how many layers are stacked at this path.
    kernel: (in, out).
    spec: of the weight, as text.
    slots: {slot: shape with stack axes}.
    parameters: trainable numbers of its own, over all layers.
    experts: 'each' where every expert has arrays of its own, 'one' where all share them, else ''.
    kind: the adapter type.
  """

  path: str
  layers: int
  kernel: tuple[int, int]
  spec: str
  slots: dict[str, tuple[int, ...]]
  parameters: int
  experts: str = ''
  kind: str = ''


@dataclasses.dataclass(frozen=True)
class Report:
  """What `attach` did.

  Attributes:
    name: of the adapter, and `adapter` its type and fields.
    rows: one per adapted layer.
    missed: linear layers that carry no adapter of this name.
    trainable: trainable numbers of the adapter.
    total: numbers of all weights that can be adapted by a linear rule.
    coverage: share of those weights, in [0, 1], whose layer was adapted.
    nbytes: bytes of the adapter on one device, unsharded.
    dropped: mesh axes that do not divide a dimension of the adapter's arrays.
  """

  name: str
  adapter: Any
  rows: tuple[Row, ...]
  missed: tuple[str, ...]
  trainable: int
  total: int
  coverage: float
  nbytes: int
  dropped: tuple[_specs.Dropped, ...]

  @classmethod
  def of(
    cls,
    every: Sequence[_sites.Site],
    plans: Sequence[_plan.Plan],
    adapter: Any,
    name: str,
  ) -> Report:
    """The report of some plans on a model with the sites `every`."""
    chosen = {p.site.name for p in plans}
    linear = [s for s in every if s.kind.linear]
    total = sum(_weights(s) for s in linear)
    rows = tuple(_row(p) for p in plans)
    return cls(
      name=name,
      adapter=adapter,
      rows=rows,
      missed=tuple(s.name for s in linear if s.name not in chosen),
      trainable=sum(row.parameters for row in rows) + _shared(plans, trainable=True),
      total=total,
      coverage=sum(_weights(s) for s in linear if s.name in chosen) / total if total else 0.0,
      nbytes=sum(_slot_bytes(p, n) for p in plans for n, s in p.slots.items() if not s.shared)
      + _shared(plans),
      dropped=tuple(d for p in plans for d in p.dropped),
    )

  def table(self) -> str:
    """The report as text."""
    some = any(row.experts for row in self.rows)
    head = ('layer', 'layers', 'kernel', 'spec', 'slots', 'parameters')
    several = len({row.kind for row in self.rows}) > 1
    head += ('experts',) if some else ()
    head += ('adapter',) if several else ()
    lines = [
      (
        row.path,
        str(row.layers),
        f'{row.kernel[0]} x {row.kernel[1]}',
        row.spec,
        ' '.join(f'{n}{list(s)}' for n, s in row.slots.items()),
        f'{row.parameters:,}',
        *((row.experts,) if some else ()),
        *((row.kind,) if several else ()),
      )
      for row in self.rows
    ]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    text = [
      '  '.join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
      for line in [head, *lines]
    ]
    text.append(
      f'{self.name}: {self.adapter}: {self.trainable:,} trainable, {self.nbytes:,} bytes, '
      f'{100 * self.coverage:.1f} % of {self.total:,} linear weights'
    )
    if self.missed:
      text.append('not adapted: ' + ', '.join(self.missed))
    text += [f'dropped: {d}' for d in self.dropped]
    return '\n'.join(text)

  __str__ = table


def _weights(site: _sites.Site) -> int:
  return math.prod(site.shape) * math.prod(site.layers)


def _slot_bytes(plan: _plan.Plan, name: str) -> int:
  return math.prod(plan.shapes[name]) * _parts.bits(plan.slots[name].dtype) // 8


def _shared(plans: Sequence[_plan.Plan], *, trainable: bool = False) -> int:
  """Bytes of the shared slots, each once; or how many numbers of them are trained."""
  once = {(p.adapter, n): p for p in plans for n in _plan.shared(p.slots)}
  if not trainable:
    return sum(_slot_bytes(p, n) for (_, n), p in once.items())
  return sum(math.prod(p.shapes[n]) for (_, n), p in once.items() if p.slots[n].trainable)


def _row(plan: _plan.Plan) -> Row:
  site = plan.site
  placed = getattr(jax.tree.leaves(site.weight.get_raw_value())[0], 'sharding', None)
  spec = str(getattr(placed, 'spec', '-')).removeprefix('PartitionSpec')
  return Row(
    path=site.name,
    layers=math.prod(site.layers),
    kernel=(site.sizes['in'], site.sizes['out']),
    spec=spec,
    slots=dict(plan.shapes),
    parameters=sum(
      math.prod(plan.shapes[n]) for n, s in plan.slots.items() if s.trainable and not s.shared
    ),
    experts=site.shared_by,
    kind=type(plan.adapter).__name__,
  )

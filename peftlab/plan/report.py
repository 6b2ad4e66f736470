"""A plan as text: memory against the chip's, time against the roofline, collectives."""

from __future__ import annotations

from collections.abc import Sequence

from peftlab import _registry
from peftlab.plan.advice import advice
from peftlab.plan.planning import Plan
from peftlab.train import page

_MOST_DROPPED = 6
_LARGE = 0.1  # of all that is sent: a collective that is named


def text(plan: Plan) -> str:
  """All of a plan."""
  parts = [_head(plan), *_memory(plan), '', *_time(plan)]
  if plan.costs is not None and plan.costs.moved:
    parts += ['', *_collectives(plan)]
  if plan.dropped:
    parts += ['', *_dropped(plan)]
  lines = advice(plan)
  if lines:
    parts += ['', 'to fit, try' if not plan.fits else 'to change', *(f'  - {x}' for x in lines)]
  return '\n'.join(parts)


def _head(plan: Plan) -> str:
  e = plan.experiment
  adapter = _registry.adapters.name_of(e.adapter)
  mesh = ' x '.join(f'{name} {size}' for name, size in plan.mesh.items()) or 'no mesh'
  pack = f', {plan.trials} trials in one program' if plan.trials > 1 else ''
  device = 'device' if plan.chip.per_chip > 1 else 'chip'
  return (
    f'{e.name} on {plan.topology}: {plan.used} of {plan.there} {device}s ({mesh})\n'
    f'  {e.base.source}, {e.base.dtype}, remat {e.base.remat}; {adapter}, '
    f'{plan.trainable:,} trained numbers{pack}\n'
    f'  {e.data.batch} x {e.data.length} tokens a step; compiled in {plan.compile_seconds:.0f} s\n'
  )


def _memory(plan: Plan) -> list[str]:
  memory, held = plan.memory, plan.held
  rows = [(name, size) for name, size in held.items()]
  if memory.fits:
    rows += [
      ('padding', max(memory.arguments - sum(held.values()), 0)),
      ('temporaries', memory.temporaries),
      ('outputs, program', memory.outputs + memory.code),
    ]
  lines = [f'memory of one {"device" if plan.chip.per_chip > 1 else "chip"}']
  lines += [_row(name, page.size(size)) for name, size in rows]
  whole = plan.chip.hbm if memory.limit is None else memory.limit
  share = memory.total / whole
  verdict = 'it fits' if memory.fits else 'IT DOES NOT FIT'
  note = f'{share:.0%} of {page.size(whole)}: {verdict}'
  return [*lines, _row('in all', page.size(memory.total), note)]


def _row(name: str, value: str, note: str = '') -> str:
  return f'  {name:<18}{value:>12}  {note}'.rstrip()


def _time(plan: Plan) -> list[str]:
  costs, time = plan.costs, plan.time
  if costs is None or time is None:
    return ['time of a step: no program was made']
  bound = time.bound
  parts = ('matrix units', bound.compute), ('main memory', bound.memory)
  peaks = (*parts, ('interconnect', bound.network))
  note = ', '.join(f'{name} {seconds(value)}' for name, value in peaks)
  lines = [
    f'time of a step ({costs.flops / 1e12:.3g} Tflop of matrix products on each device)',
    _row('roofline', seconds(bound.seconds), note),
  ]
  if time.seconds is None or time.most is None:
    return [*lines, _row('estimate', 'none', f'the roofline alone: {"; ".join(time.doubts)}')]
  busy = f'matrix units busy {bound.compute / time.seconds:.0%}'
  others = f'{seconds(time.others)} to {seconds(max(time.others, time.others_cycles))}'
  rows = [
    _row('estimate', seconds(time.seconds), f'to {seconds(time.most)}, of which'),
    _row('', '', f'  matrix products {seconds(time.products)}'),
    _row('', '', f'  other operations {others}'),
    _row('', '', f'  collectives that wait {seconds(time.network)}'),
    _row('tokens a second', f'{plan.tokens / time.seconds:,.0f}', busy),
  ]
  return lines + rows


def _collectives(plan: Plan) -> list[str]:
  assert plan.costs is not None
  rows = [('', 'times', 'group', 'bytes', 'sent', 'hidden')]
  rows += [
    (
      f'  {m.kind}',
      f'{m.count:,}',
      str(m.group),
      page.size(m.payload),
      page.size(int(m.sent)),
      f'{m.hidden / m.sent if m.sent else 0:.0%}',
    )
    for m in plan.costs.kinds
  ]
  lines = ['collectives of a step, on one device', columns(rows, left=1)]
  largest = [m for m in plan.costs.moved if m.sent > _LARGE * plan.costs.sent]
  lines += [
    f'  {m.count:,} x {m.kind} of {m.array} sends {page.size(int(m.sent))}' for m in largest
  ]
  return lines


def _dropped(plan: Plan) -> list[str]:
  lines = ['mesh axes that do not divide']
  ordered = sorted(plan.dropped, key=lambda d: -d.extra_bytes)
  lines += [f'  {d}' for d in ordered[:_MOST_DROPPED]]
  if len(ordered) > _MOST_DROPPED:
    rest = sum(d.extra_bytes for d in ordered[_MOST_DROPPED:])
    lines.append(f'  and {len(ordered) - _MOST_DROPPED} more, +{rest:,} bytes per device')
  return lines


def seconds(value: float) -> str:
  """1.25 -> '1.25 s', 0.0125 -> '12.5 ms'."""
  for unit, scale in (('s', 1.0), ('ms', 1e3)):
    if value * scale >= 1:
      return f'{value * scale:.3g} {unit}'
  return f'{value * 1e6:.3g} us'


def curve(plans: Sequence[Plan]) -> str:
  """A line per pack of one experiment: memory, time, and time of one trial's step."""
  rows = [('trials', 'memory', 'share', 'a step', 'a trial-step', 'roofline of it', 'fits')]
  rows += [
    (
      str(plan.trials),
      page.size(plan.memory.total),
      share(plan),
      step_time(plan),
      step_time(plan, plan.trials),
      '-' if plan.time is None else seconds(plan.time.bound.seconds / plan.trials),
      'yes' if plan.fits else 'NO',
    )
    for plan in plans
  ]
  return columns(rows)


def share(plan: Plan) -> str:
  """Of the memory of a device."""
  return f'{plan.memory.total / (plan.memory.limit or plan.chip.hbm):.0%}'


def step_time(plan: Plan, trials: int = 1) -> str:
  """The estimate of a step over so many trials; where it cannot be trusted, the roofline."""
  if plan.time is None:
    return '-'
  if plan.time.seconds is None:
    return f'> {seconds(plan.time.bound.seconds / trials)}'
  return seconds(plan.time.seconds / trials)


def columns(rows: Sequence[Sequence[str]], left: int = 0) -> str:
  """Rows as aligned columns, the first `left` of them to the left."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    cells = (
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    lines.append('  '.join(cells).rstrip())
  return '\n'.join(lines)

"""What to change in an experiment, from its plan: where memory or time goes, and which flag."""

from __future__ import annotations

from peftlab.plan.planning import Plan
from peftlab.train import page

# Below this share of the memory there is room for more.
_ROOMY = 0.45
# A remat policy -> the one that keeps less.
_NEXT = {'none': 'outputs', 'everything': 'outputs', 'dots': 'outputs', 'outputs': 'full'}


def advice(plan: Plan) -> list[str]:
  """Lines for a person, the most useful first; none where there is nothing to say."""
  lines = _to_fit(plan) if not plan.fits else _to_use(plan)
  return lines + _dropped(plan)


def _to_fit(plan: Plan) -> list[str]:
  base, train = plan.experiment.base, plan.experiment.train
  found = []
  if plan.trials > 1:
    found.append(f'fewer trials in the pack than {plan.trials} (--pack)')
  if plan.used < plan.there:
    found.append(_more_devices(plan))
  if base.dtype == 'float32':
    found.append('--config.base.dtype=bfloat16 halves base and activations')
  if plan.held['base'] > 0.3 * plan.memory.total and not base.quant:
    held = page.size(plan.held['base'])
    found.append(f'--config.base.quant=nf4: the base takes {held} of each device')
  if base.remat in _NEXT:
    found.append(f'--config.base.remat={_NEXT[base.remat]} keeps less for the backward pass')
  if plan.experiment.data.batch > train.accumulate * plan.used:
    found.append(f'--config.train.accumulate={train.accumulate * 2} halves the activations')
  if plan.used == plan.there:
    found.append('a larger topology, with mesh.fsdp over it')
  return found


def _to_use(plan: Plan) -> list[str]:
  found = [_more_devices(plan)] if plan.used < plan.there else []
  if plan.experiment.base.dtype == 'float32':
    found.append('--config.base.dtype=bfloat16: half the memory and half the bytes to move')
  found += _bound(plan)
  if plan.memory.total < _ROOMY * plan.chip.hbm:
    times = max(2, int(plan.chip.hbm * 0.9 / plan.memory.total))
    found.append(
      f'room for {times} times as much: a larger data.batch, a pack of more trials, or a remat '
      'that keeps more (--config.base.remat=none)'
    )
  return found


def _bound(plan: Plan) -> list[str]:
  if plan.time is None or plan.costs is None:
    return []
  by, found = plan.time.bound.by, []
  if plan.time.network > plan.time.products and plan.costs.moved:
    most = plan.costs.moved[0]
    found.append(
      f'collectives that wait take longer than the matrix products: {most.count:,} x {most.kind} '
      f'of {most.array} first of all'
    )
  if by == 'interconnect':
    line = (
      'the interconnect bounds a step: more rows on each device, or a mesh with less fsdp and more '
      'data'
    )
    return [*found, line]
  if by == 'main memory':
    found.append('main memory bounds a step: more rows on each device use each byte more often')
  return found


def _more_devices(plan: Plan) -> str:
  return (
    f'{plan.used} of {plan.there} devices are used: --config.mesh.fsdp=-1 takes all (data.batch '
    f'must then be a multiple of {plan.there})'
  )


def _dropped(plan: Plan) -> list[str]:
  if not plan.dropped:
    return []
  worst = max(plan.dropped, key=lambda d: d.extra_bytes)
  line = (
    f'mesh.{worst.axis}={worst.axis_size} does not divide {worst.path} ({worst.size}): another '
    f'size of the axis, or a tile that leaves a multiple of {worst.axis_size} tiles'
  )
  return [line]

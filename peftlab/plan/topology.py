"""TPU topologies on a machine without a TPU: devices as libtpu's compiler knows them."""

from __future__ import annotations

import importlib.util
import math
import os
import re

import jax

from peftlab import _registry
from peftlab.plan.chips import CHIPS, Chip

# What libtpu asks a TPU machine for, answered here: there is none.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # several plans may run at once
}
_EXAMPLES = 'v5e:16x16, v5p:8x8x8, v6e:2x4, tpu7x:2x2x1'


def missing() -> str | None:
  """Why no topology can be had here, None where it can."""
  if importlib.util.find_spec('libtpu') is not None:
    return None
  return (
    "libtpu, the TPU compiler, is not installed. Install the extra 'tpu' (pip install "
    "'.[tpu]'), which also works on a machine without a TPU."
  )


def read(name: str) -> tuple[Chip, tuple[int, ...]]:
  """'v6e:2x4' -> (the chip, (2, 4)).

  Raises:
    ValueError: no such chip, or no such shape.
  """
  found = re.fullmatch(r'([a-z0-9]+):(\d+(?:x\d+)*)', name)
  if not found:
    raise ValueError(f'--topology is {name!r}; expected CHIP:SHAPE, for example {_EXAMPLES}.')
  if found[1] not in CHIPS:
    near = _registry.did_you_mean(found[1], CHIPS)
    raise ValueError(f'No chip {found[1]!r}{near or "."} Chips: {", ".join(CHIPS)}.')
  shape = tuple(int(size) for size in found[2].split('x'))
  wanted = CHIPS[found[1]].ports // 2
  if len(shape) != wanted or not math.prod(shape):
    raise ValueError(
      f'--topology is {name!r}; a shape of {found[1]} has {wanted} sizes of at least 1, for '
      f'example {_EXAMPLES}.'
    )
  return CHIPS[found[1]], shape


def devices(name: str) -> tuple[Chip, list[jax.Device]]:
  """The devices of a topology, which can be compiled for and nothing else.

  Raises:
    ValueError: no such topology, or libtpu is missing or refuses it.
  """
  chip, shape = read(name)
  if (why := missing()) is not None:
    raise ValueError(why)
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', f'{chip.name}-{math.prod(shape)}')
  from jax.experimental import topologies

  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=name)
  except Exception as error:
    why = ' '.join(str(error).split())
    raise ValueError(f'libtpu refuses the topology {name!r}: {why.rstrip(".")}.') from error
  return chip, list(found.devices)

"""A few numbers of each adapted kernel: an adapter knows its base, in any precision."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from peftlab import _processes, _sites, _stack

COUNT = 4
# Rounding a base to 4 bits moves its numbers by a tenth; two bases are uncorrelated (1.4).
FURTHEST = 0.5


def sample(site: _sites.Site) -> np.ndarray:
  """Numbers of every layer's weight at a site, [*layers, COUNT], at places its sizes decide."""
  rng = np.random.default_rng(site.shape)
  own = [rng.integers(0, size, COUNT) for size in site.shape]
  stacked = np.indices(site.layers)[..., None] if site.layers else ()
  index = _stack.insert(tuple(own), site.stack, tuple(stacked))
  found = site.weight.get_raw_value()[tuple(jnp.asarray(i) for i in index)]
  return _processes.host(found).astype(np.float32)


def distance(found: dict[Any, list[float]], told: dict[Any, Any]) -> float:
  """Root mean square of the difference, relative to the numbers told; over all common sites."""
  pairs = [(found[name], told[name]) for name in found if name in told]
  if not pairs:
    return 0.0
  ours = np.concatenate([np.asarray(a, np.float64) for a, _ in pairs])
  theirs = np.concatenate([np.asarray(b, np.float64) for _, b in pairs])
  if ours.shape != theirs.shape:
    return math.inf
  size = float(np.sqrt(np.mean(theirs**2)))
  return float(np.sqrt(np.mean((ours - theirs) ** 2))) / max(size, 1e-30)

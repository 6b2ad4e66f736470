"""What the backward pass of a layer recomputes instead of keeping: one word per policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from peftlab import _kernel, _registry

POLICIES: dict[str, Any] = {
  'full': None,
  'outputs': jax.checkpoint_policies.save_only_these_names(_kernel.OUTPUT),
  'dots': jax.checkpoint_policies.dots_saveable,
  'dots_no_batch': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'everything': jax.checkpoint_policies.everything_saveable,
  'nothing': jax.checkpoint_policies.nothing_saveable,
}


def check(policy: str) -> str:
  """The policy's word, if it is one.

  Raises:
    ValueError: an unknown word.
  """
  if policy not in ('none', *POLICIES):
    near = _registry.did_you_mean(policy, ['none', *POLICIES])
    raise ValueError(
      f'No remat policy {policy!r}{near or "."} Policies: none, {", ".join(POLICIES)}.'
    )
  return policy


# Cheap to compute again. A layer that reads its arrays out of a stack itself would else keep a copy
# of its slice of the base for every time it runs.
CHEAP = (
  'broadcast_in_dim',
  'convert_element_type',
  'dynamic_slice',
  'reshape',
  'slice',
  'squeeze',
  'transpose',
)


def wrap_reading(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
  """`wrap` in a loop, for a function that reads its arrays out of a stack: never keeps a slice."""
  keeps = _all_but_cheap if policy in ('none', 'everything') else POLICIES[policy]
  return jax.checkpoint(function, policy=keeps, prevent_cse=False)


def _all_but_cheap(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
  del arguments, parameters
  return primitive.name not in CHEAP


def wrap(function: Callable[..., Any], policy: str, *, in_loop: bool) -> Callable[..., Any]:
  """`function` under `jax.checkpoint`: 'none' keeps all it needs, 'full' recomputes all.

  Args:
    function: to differentiate.
    policy: see `POLICIES`.
    in_loop: it is the body of a compiled loop; elsewhere the compiler must be kept from finding
      that what is computed again was computed before.
  """
  if policy == 'none':
    return function
  return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=not in_loop)

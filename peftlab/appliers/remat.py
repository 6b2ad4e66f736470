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

"""Layers of a file that become one stack: one adapter for all of them, sizes filled up by zeros."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import warnings

import numpy as np

from peftlab import _adapter, _plan


def common(adapters: Collection[_adapter.Adapter], where: str) -> _adapter.Adapter:
  """The adapter that a stack has whose layers have these.

  They may differ in sizes that zeros can fill up without changing anything (`PeftForm.padded`): the
  rank of a product of two matrices.

  Raises:
    ValueError: they differ in more.
  """
  first, *others = adapters
  padded = first.peft.padded if first.peft else ()
  fields = [field.name for field in dataclasses.fields(first) if field.compare]
  for other in others:
    differ = {name for name in fields if getattr(first, name) != getattr(other, name, None)}
    if type(other) is not type(first) or not differ <= set(padded):
      told = ', '.join(sorted(map(repr, adapters)))
      raise ValueError(f'{where} has several adapters in one stack: {told}.')
  largest = {name: max(getattr(a, name) for a in adapters) for name in padded}
  return dataclasses.replace(first, **largest)


def padded(slots: Mapping[str, np.ndarray], adapter: _adapter.Adapter) -> dict[str, np.ndarray]:
  """The slots of a layer with the sizes of the stack's adapter."""
  words = adapter.peft.padded if adapter.peft else ()
  known = adapter.slots()
  return {
    n: _filled(a, known[n].dims, words, adapter) if n in known else a for n, a in slots.items()
  }


def _filled(
  array: np.ndarray, dims: str, words: Sequence[str], adapter: _adapter.Adapter
) -> np.ndarray:
  named = dims.split()
  if len(named) != array.ndim:
    return array  # it does not fit, and the message is that of whoever checks it
  size = [
    getattr(adapter, w) - n if w in words else 0 for w, n in zip(named, array.shape, strict=True)
  ]
  return np.pad(array, [(0, n) for n in size]) if any(size) else array


def check_start(
  plans: Sequence[_plan.Plan],
  lost: Mapping[tuple, Sequence[str]],
  *,
  partial: bool,
  have: int,
  subject: str,
) -> None:
  """Warns of layers that a file lacks and that get a fresh adapter, which changes nothing.

  Args:
    plans: of their stacks.
    lost: {path of a stack: names of its layers that the file lacks}.
    partial: whether that may be.
    have: how many layers the file has.
    subject: the start of the message.

  Raises:
    ValueError: it may not, or a fresh adapter of the type does change something.
  """
  names = [name for plan in plans for name in lost[plan.site.path]]
  told = f'{subject} has {have} of {have + len(names)} layers; missing: {", ".join(names[:6])}.'
  if not partial or not all(plan.adapter.identity_at_start for plan in plans):
    raise ValueError(f'{told} A stack takes an adapter on all of its layers.')
  warnings.warn(
    f'{told} They are in one stack with the others and get a fresh adapter, which changes nothing '
    'until it is trained.',
    stacklevel=2,
  )

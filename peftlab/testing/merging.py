"""Properties of fuse: the kernel whose plain matmul equals apply."""

from __future__ import annotations

from peftlab.testing import case as cases
from peftlab.testing import probe


def fuse_equals_apply(case: cases.Case) -> None:
  """x @ fuse(w, p) + fuse_bias(b, p) equals apply(x, base, p) + b, or mergeable = False is said."""
  if not case.adapter.mergeable:
    raise cases.NotApplicable('mergeable is False')
  for random in (False, True):
    kernel = probe.probe(case.adapter, random=random)
    values = 'random' if random else 'first'
    merged = kernel.x @ kernel.fuse() + kernel.fuse_bias()
    unmerged = kernel.apply() + kernel.bias
    cases.assert_close(merged, unmerged, f'x @ fuse(w) against apply, with {values} values')


def unmergeable_refuses_to_fuse(case: cases.Case) -> None:
  """A type with mergeable = False raises ValueError in fuse."""
  if case.adapter.mergeable:
    raise cases.NotApplicable('mergeable is True')
  try:
    case.kernel.fuse()
  except ValueError:
    return
  raise AssertionError('mergeable is False, but fuse gives a kernel')


CLAIMS = (fuse_equals_apply, unmergeable_refuses_to_fuse)

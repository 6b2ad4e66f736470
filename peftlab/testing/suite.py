"""The conformance suite: one table of properties that every adapter type is put through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import time

import jax

from peftlab import _adapter, _batch, _registry
from peftlab.testing import case as cases
from peftlab.testing import (
  claims,
  contract,
  files,
  identity,
  layouts,
  merging,
  several,
  sharded,
  targets,
  training,
)

GROUPS = (
  contract,
  identity,
  layouts,
  merging,
  training,
  several,
  targets,
  claims,
  sharded,
  files,
)


@dataclasses.dataclass(frozen=True)
class Property:
  """One claim about adapter types.

  Attributes:
    name: a word for the table and for `--only`.
    group: what it is about.
    line: the claim in one line.
    check: returns where the claim holds for a case, raises AssertionError where it does not and
      `NotApplicable` where it says nothing.
  """

  name: str
  group: str
  line: str
  check: Callable[[cases.Case], None]


@dataclasses.dataclass(frozen=True)
class Result:
  """What became of one property for one adapter: 'pass', 'fail' or 'n.a.', and why."""

  property: Property
  status: str
  reason: str
  seconds: float


@functools.cache
def properties() -> tuple[Property, ...]:
  """Every property, in the order in which they are checked."""
  return tuple(
    Property(
      name=claim.__name__,
      group=group.__name__.rpartition('.')[2],
      line=(claim.__doc__ or '').splitlines()[0],
      check=claim,
    )
    for group in GROUPS
    for claim in group.CLAIMS
  )


def select(only: Iterable[str] = ()) -> tuple[Property, ...]:
  """The properties of these names or groups; all of them for none.

  Raises:
    ValueError: no property or group of that name.
  """
  every = properties()
  wanted = tuple(only)
  choices = sorted({p.name for p in every} | {p.group for p in every})
  for name in wanted:
    if name not in choices:
      near = _registry.did_you_mean(name, choices)
      raise ValueError(f'No property {name!r}{near or "."} Properties: {", ".join(choices)}.')
  return tuple(p for p in every if not wanted or p.name in wanted or p.group in wanted)


def check(claim: Property, case: cases.Case) -> Result:
  """Puts one case through one property. Whatever a plugin raises is a failure with its text.

  It runs under JAX's own promotion of ranks and dtypes, whatever the caller's setting. The models
  have no texts: every row counts as behind any tokens that an adapter asks for.
  """
  start = time.perf_counter()
  status, reason = 'pass', ''
  try:
    with (
      jax.numpy_rank_promotion('allow'),
      jax.numpy_dtype_promotion('standard'),
      _batch.offering(_batch.EVERYWHERE),
    ):
      claim.check(case)
  except cases.NotApplicable as why:
    status, reason = 'n.a.', str(why)
  except AssertionError as error:
    status, reason = 'fail', str(error)
  except Exception as error:  # noqa: BLE001, a plugin may raise anything
    status, reason = 'fail', f'{type(error).__name__}: {error}'
  return Result(claim, status, ' '.join(reason.split()), time.perf_counter() - start)


def results(
  adapter: _adapter.Adapter | type, *, only: Iterable[str] = (), thorough: bool = True
) -> Iterator[Result]:
  """Like `check_adapter`, one result at a time."""
  chosen = select(only)
  case = cases.Case(adapter, thorough=thorough)
  for claim in chosen:
    yield check(claim, case)


def check_adapter(adapter: _adapter.Adapter | type, *, only: Iterable[str] = ()) -> list[Result]:
  """Puts an adapter through the properties. Needs 8 devices, see `use_cpu_devices`.

  Args:
    adapter: an instance, or a type whose fields all have defaults (rank becomes 2).
    only: names of properties or groups; all of them for none.

  Raises:
    ValueError: an unknown name in `only`, or a type with a field without default.
  """
  return list(results(adapter, only=only))

"""Compiles the step of a run, or of a pack of trials, from shapes, and reads what it needs."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from peftlab import _specs
from peftlab.plan import shapes as plan_shapes
from peftlab.sweep import program as packs
from peftlab.train import step
from peftlab.train.opt_state import StepOptions

# How the compiler says that a program is too large, (wanted, unit, had, unit).
_REFUSALS = (
  r'\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)',
  r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm',
)
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Bytes on one device while the step runs, by the compiler's own figures.

  Attributes:
    arguments: base, adapter, optimizer state, batch.
    outputs: that do not lie where an argument did.
    temporaries: what is alive at the worst moment.
    code: of the program.
    total: of all; where the program did not fit, what the compiler wanted.
    limit: what the compiler had, where it did not fit.
  """

  arguments: int = 0
  outputs: int = 0
  temporaries: int = 0
  code: int = 0
  total: int
  limit: int | None = None

  @property
  def fits(self) -> bool:
    """Whether the compiler found room for all."""
    return self.limit is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """A compiled step.

  Attributes:
    memory: of one device.
    text: of the program, '' where it did not fit.
    seconds: that compiling took.
  """

  memory: Memory
  text: str
  seconds: float


def compile_step(shapes: plan_shapes.Shapes) -> Compiled:
  """The step that `train.run` uses, compiled for the devices of the shapes.

  Raises:
    ValueError: a role that no slot has.
  """
  made = step.step_for(shapes.parts, shapes.state, shapes.options)
  return _compile(made.lower, shapes, shapes.parts.adapter, shapes.state, shapes.parts.base)


def compile_pack(
  shapes: plan_shapes.Shapes,
  size: int,
  *,
  variants: Sequence[StepOptions] = (),
  lengths: dict[str, int] | None = None,
) -> Compiled:
  """The update of a pack, as `sweep.program` makes it.

  Args:
    shapes: of one trial, padded to the largest.
    size: trials in the pack.
    variants: options of the trials' steps; default: those of the shapes.
    lengths: {path: dimensions} of arrays that are padded for some trial.
  """
  beside = shapes.state.step.sharding

  def stacked(leaf: Any) -> Any:
    where = packs.stacked_sharding(leaf.sharding)
    return jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype, sharding=where)

  def numbers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct((size, *shape), jnp.int32, sharding=beside)

  adapter, state = jax.tree.map(stacked, (shapes.parts.adapter, shapes.state))
  ragged = {name: numbers(rank) for name, rank in (lengths or {}).items()}
  trees = packs.Trees(adapter, state, numbers(), ragged)
  run = functools.partial(packs.update, shapes.parts.graph, tuple(variants) or (shapes.options,))
  where = jax.tree.map(lambda a: a.sharding, trees)
  jitted = jax.jit(run, donate_argnums=(0,), out_shardings=(where, None))
  batch = {name: stacked(leaf) for name, leaf in shapes.batch.items()}
  whole = dataclasses.replace(shapes, batch=batch)
  return _compile(jitted.lower, whole, trees, shapes.parts.base)


def _compile(lower: Any, shapes: plan_shapes.Shapes, *arguments: Any) -> Compiled:
  started = time.monotonic()
  with _specs.using(shapes.mesh):
    lowered = lower(*arguments, shapes.batch)
    try:
      compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      memory = refused(str(error))
      if memory is None:
        raise
      return Compiled(memory=memory, text='', seconds=time.monotonic() - started)
  found: Any = compiled.memory_analysis()
  outputs = found.output_size_in_bytes - found.alias_size_in_bytes
  memory = Memory(
    arguments=found.argument_size_in_bytes,
    outputs=outputs,
    temporaries=found.temp_size_in_bytes,
    code=found.generated_code_size_in_bytes,
    total=found.argument_size_in_bytes
    + outputs
    + found.temp_size_in_bytes
    + found.generated_code_size_in_bytes,
  )
  return Compiled(memory=memory, text=compiled.as_text(), seconds=time.monotonic() - started)


def refused(message: str) -> Memory | None:
  """What the compiler says it wanted and had, where a program did not fit; else None."""
  for pattern in _REFUSALS:
    if found := re.search(pattern, message):
      used, limit = (int(float(found[n]) * _UNITS[found[n + 1]]) for n in (1, 3))
      return Memory(total=used, limit=limit)
  return None

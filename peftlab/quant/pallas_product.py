"""A TPU kernel for the product of x and a quantized kernel: tiles are decoded in vector memory."""

from __future__ import annotations

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from peftlab.quant import quantizer

ROWS, OUTS, INS = 1024, 512, 512  # of a block: x, the accumulator and the decoded block fit 16 MB


def product(
  chosen: quantizer.Quantizer, x: jax.Array, arrays: quantizer.Arrays, *, interpret: bool = False
) -> jax.Array:
  """x [rows, in] times a kernel of one layer -> [rows, out], in the dtype of x.

  Each block of the kernel is decoded by the quantizer's own `decode` where it is multiplied; the
  decoded kernel is never written to memory. Any quantizer will do, any number of rows and outputs.

  Args:
    chosen: decodes.
    x: the input.
    arrays: as `encode` gives them (`expand` has run), [tiles, ..., *outs].
    interpret: run by the interpreter, for tests on a CPU.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  flat, tiles, outs = _flat(arrays)
  flat = {name: a.astype(_readable(a.dtype)) for name, a in flat.items()}
  rows, ins = x.shape
  tile = ins // tiles
  parts = _parts_of_a_tile(tile, flat['codes'])
  grid, (block_rows, block_outs, together) = blocks(rows, ins, outs, tiles, parts)
  names, block_ins = tuple(flat), tile * together // parts

  def held_spec(array: jax.Array) -> Any:
    middle = array.shape[1:-1]
    own = middle and (middle[0] // parts, *middle[1:])

    def place(i: Any, j: Any, k: Any) -> tuple:
      del i
      inner = (jax.lax.rem(k, parts), *(0,) * (len(middle) - 1)) if middle else ()
      return (jax.lax.div(k, parts), *inner, j)

    return pl.BlockSpec((together, *own, block_outs), place)

  call = pl.pallas_call(
    functools.partial(_step, chosen, names, block_ins),
    grid=grid,
    in_specs=[
      pl.BlockSpec((block_rows, block_ins), lambda i, j, k: (i, k)),
      *(held_spec(flat[name]) for name in names),
    ],
    out_specs=pl.BlockSpec((block_rows, block_outs), lambda i, j, k: (i, j)),
    out_shape=jax.ShapeDtypeStruct((rows, outs), x.dtype),
    scratch_shapes=[pltpu.VMEM((block_rows, block_outs), jnp.float32)],
    interpret=interpret,
  )
  return call(x, *flat.values())


def _step(
  chosen: quantizer.Quantizer, names: Sequence[str], ins: int, x_ref: Any, *refs: Any
) -> None:
  """One block of inputs, added to the accumulator of a block of outputs."""
  from jax.experimental import pallas as pl

  *held, y_ref, sum_ref = refs
  place = pl.program_id(2)

  @pl.when(place == 0)
  def _start() -> None:
    sum_ref[...] = jnp.zeros_like(sum_ref)

  x = x_ref[...]
  arrays = {name: ref[...] for name, ref in zip(names, held, strict=True)}
  w = chosen.decode(arrays, x.dtype).reshape(ins, -1)
  sum_ref[...] += jax.lax.dot_general(
    x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
  )

  @pl.when(place == pl.num_programs(2) - 1)
  def _end() -> None:
    y_ref[...] = sum_ref[...].astype(y_ref.dtype)


def blocks(
  rows: int, ins: int, outs: int, tiles: int, parts: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
  """The grid (of rows, outputs, inputs) and a block: its rows, outputs and tiles of inputs.

  With `parts` above 1 a block has that part of one tile.
  """
  together = _most(tiles, max(1, INS // (ins // tiles)))
  block_rows, block_outs = min(ROWS, _up(rows, 8)), min(OUTS, _up(outs, 128))
  grid = (-(-rows // block_rows), -(-outs // block_outs), tiles // together * parts)
  return grid, (block_rows, block_outs, together)


def _parts_of_a_tile(tile: int, codes: Any) -> int:
  """Into how many blocks a long tile is cut; not where a code is of two inputs."""
  return tile // INS if tile % INS == 0 and codes.shape[1] == tile else 1


def bytes_moved(x: Any, arrays: quantizer.Arrays) -> int:
  """Bytes between memory and chip in `product`, by its grid: arrays or shapes, expanded.

  A block is read again at each step that needs another than the step before it: x once per block
  of outputs, codes and scales once per block of rows; each output is written once.
  """
  codes = arrays['codes']
  (rows, ins), tiles, outs = x.shape, codes.shape[0], math.prod(codes.shape[2:])
  parts = _parts_of_a_tile(ins // tiles, codes)
  (of_rows, of_outs, of_ins), _ = blocks(rows, ins, outs, tiles, parts)
  itemsize = quantizer.dtype_bits(x.dtype) // 8
  once = rows * ins * itemsize
  bits = {name: quantizer.dtype_bits(_readable(a.dtype)) for name, a in arrays.items()}
  held = sum(math.prod(a.shape) * bits[name] // 8 for name, a in arrays.items())
  x_reads = of_outs if of_ins > 1 else 1
  code_reads = of_rows if of_outs * of_ins > 1 else 1
  return x_reads * once + code_reads * held + rows * outs * itemsize


def _readable(dtype: Any) -> Any:
  """What an array becomes before the kernel reads it, in which a TPU has no float16."""
  return jnp.float32 if dtype == jnp.float16 else dtype


def _flat(arrays: quantizer.Arrays) -> tuple[dict[str, jax.Array], int, int]:
  """Arrays with one dimension of outputs, the number of tiles, of outputs."""
  kept = arrays['codes'].ndim - 2
  flat = {
    name: a.reshape(*a.shape[: a.ndim - kept], math.prod(a.shape[a.ndim - kept :]))
    for name, a in arrays.items()
  }
  return flat, flat['codes'].shape[0], flat['codes'].shape[-1]


def _most(count: int, limit: int) -> int:
  """The greatest divisor of `count` up to `limit`."""
  return next(n for n in range(min(count, limit), 0, -1) if count % n == 0)


def _up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple

"""Rows sorted by group, cut into blocks of one group each, so that vmap gives each its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp

MAX_BLOCK = 256  # rows; a block reads the arrays of its group once


def group_of_row(group_sizes: jax.Array, rows: int) -> jax.Array:
  """Group sizes [groups] -> the group of each of `rows` sorted rows, [rows] int32."""
  ends = jnp.cumsum(group_sizes)
  found = jnp.searchsorted(ends, jnp.arange(rows), side='right', method='scan_unrolled')
  return found.astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
  """How sorted rows lie in blocks: every group starts a block, its last one is padded with zeros.

  Attributes:
    place: of each row among the rows of all blocks, [rows].
    group: of each block, [blocks].
    size: rows of a block.
  """

  place: jax.Array
  group: jax.Array
  size: int = dataclasses.field(metadata={'static': True})

  @classmethod
  def of(cls, group_sizes: jax.Array, rows: int) -> Blocks:
    """The blocks of `rows` rows, the first group_sizes[0] of group 0 and so on."""
    groups = group_sizes.shape[0]
    size = min(MAX_BLOCK, 1 << max(0, (rows // groups).bit_length() - 1))
    count = -(-rows // size) + groups
    of_group = -(-group_sizes // size)
    first_block, first_row = (jnp.cumsum(n) - n for n in (of_group, group_sizes))
    mine = jnp.minimum(group_of_row(group_sizes, rows), groups - 1)
    place = first_block[mine] * size + jnp.arange(rows) - first_row[mine]
    group = jnp.minimum(group_of_row(of_group, count), groups - 1)
    return cls(place.astype(jnp.int32), group, size)

  def enter(self, x: jax.Array) -> jax.Array:
    """Rows [rows, n] -> [blocks, size, n]."""
    padded = jnp.zeros((self.group.shape[0] * self.size, x.shape[-1]), x.dtype)
    return padded.at[self.place].set(x).reshape(-1, self.size, x.shape[-1])

  def leave(self, y: jax.Array) -> jax.Array:
    """[blocks, size, n] -> rows [rows, n]: inverse of `enter`."""
    return y.reshape(-1, y.shape[-1])[self.place]

  def take(self, array: jax.Array) -> jax.Array:
    """One array per group [groups, ...] -> one per block [blocks, ...]."""
    return array[self.group]


@custom_vmap
def block_dot(
  x: jax.Array, kernels: jax.Array, group: jax.Array, group_sizes: jax.Array, blocks: Blocks
) -> jax.Array:
  """x [size, in] of one block @ the kernel of its group, of kernels [groups, in, out].

  Under a vmap over the blocks it is one ragged product, in which no kernel is read twice.
  """
  del group_sizes, blocks
  return x @ kernels[group]


@block_dot.def_vmap
def _all_blocks(
  count: int,
  batched: Any,
  x: jax.Array,
  kernels: jax.Array,
  group: jax.Array,
  group_sizes: jax.Array,
  blocks: Blocks,
) -> tuple[jax.Array, bool]:
  del count, batched, group
  return blocks.enter(jax.lax.ragged_dot(blocks.leave(x), kernels, group_sizes)), True

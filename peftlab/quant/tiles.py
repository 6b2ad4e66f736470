"""The tile of a kernel: checked against its sizes, or chosen so that a mesh axis divides them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from peftlab.quant import quantizer

SMALLEST = 8  # inputs; below it the scales cost more than the codes of 4 bits
SHOWN = 6  # of the tiles that would do, in a message

AUTO = 'auto'
Tile = int | str | None


def settle(
  chosen: quantizer.Quantizer, tile: Tile, *, inputs: int, shards: int, name: str, dimension: str
) -> quantizer.Quantizer:
  """The quantizer with the tile that a kernel gets.

  Args:
    chosen: its own tile holds where none is asked for, and is the most that 'auto' takes.
    tile: inputs that share a scale, 0 for all of them, 'auto', or None.
    inputs: of the kernel.
    shards: into how many parts a mesh cuts the inputs; 'auto' gives each part whole tiles.
    name: of the weight, for messages.
    dimension: the word for its inputs, likewise.

  Raises:
    ValueError: a tile that does not divide the inputs.
  """
  given, tile = chosen, parsed(tile)
  if tile == AUTO:
    return dataclasses.replace(chosen, tile=_automatic(chosen, inputs, shards, name))
  if tile is not None:
    asked: Any = tile  # which the quantizer checks
    chosen = dataclasses.replace(chosen, tile=asked)
  if chosen.tile and inputs % chosen.tile:
    fits = ', '.join([*map(str, nearest(inputs, chosen.tile)), '0 (all of them)'])
    auto = " or 'auto'" if _largest(given.tile, inputs, shards) else ''
    advice = f'Tiles that would: {fits}{auto}.'
    if chosen.exact_tile:
      advice = f'{chosen.name} has no other tile: leave this layer out, or take another quantizer.'
    raise ValueError(
      f'{name}: the tile {chosen.tile} of {chosen.name} does not divide {dimension} ({inputs}). '
      f'{advice}'
    )
  return chosen


def parsed(tile: Tile) -> Tile:
  """A tile as it is written in a flag: '64', 'auto', '' for the quantizer's own.

  Raises:
    ValueError: another word, or a negative number.
  """
  if isinstance(tile, np.integer):
    return int(tile)
  if isinstance(tile, str) and tile != AUTO:
    if tile and not tile.isdecimal():
      raise ValueError(
        f"tile is {tile!r}; expected a number of inputs (0 for all), 'auto', or nothing."
      )
    return int(tile) if tile else None
  return tile


def _automatic(chosen: quantizer.Quantizer, inputs: int, shards: int, name: str) -> int:
  """The largest tile at most the quantizer's own that gives every shard whole tiles."""
  if chosen.exact_tile or not chosen.tile:
    return settle(
      chosen, None, inputs=inputs, shards=shards, name=name, dimension='the inputs'
    ).tile
  found = _largest(chosen.tile, inputs, shards)
  if found:
    return found
  fits = ', '.join([*map(str, nearest(inputs, chosen.tile)), '0 (one scale per output)'])
  raise ValueError(
    f"{name}: 'auto' takes a tile of {SMALLEST} to that of {chosen.name} ({chosen.tile}), and none "
    f'divides the inputs ({inputs}). Tiles that would: {fits}; or leave this layer out.'
  )


def _largest(most: int, inputs: int, shards: int) -> int:
  """What 'auto' takes of a quantizer whose own tile is `most`; 0 where there is none."""
  part = inputs // shards if inputs % shards == 0 else inputs
  return max(divisors(part, most)[-1:] or divisors(inputs, most)[-1:], default=0)


def divisors(size: int, most: int) -> list[int]:
  """The divisors of a size from SMALLEST to `most`, rising."""
  return [n for n in range(SMALLEST, min(size, most) + 1) if size % n == 0]


def nearest(inputs: int, tile: int) -> list[int]:
  """The divisors of some inputs, but for all of them, that are nearest to a tile, rising."""
  every = [n for n in range(2, inputs // 2 + 1) if inputs % n == 0]
  usual = [n for n in every if n >= SMALLEST]  # smaller ones only where there are no others
  return sorted(sorted(usual or every, key=lambda n: abs(n - tile))[:SHOWN])

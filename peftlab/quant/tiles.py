"""The tile of a kernel: checked against its sizes, or chosen so that a mesh axis divides them."""

from __future__ import annotations

import dataclasses

from peftlab.quant import quantizer

SMALLEST = 8  # inputs; below it the scales cost more than the codes of 4 bits

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
  tile = parsed(tile)
  if tile == AUTO:
    return dataclasses.replace(chosen, tile=_automatic(chosen, inputs, shards, name))
  if isinstance(tile, int):
    chosen = dataclasses.replace(chosen, tile=tile)
  if chosen.tile and inputs % chosen.tile:
    fits = ', '.join(map(str, divisors(inputs, chosen.tile))) or 'none'
    advice = f"Tiles that would: {fits}, 0 (all of them) or 'auto'."
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
  part = inputs // shards if inputs % shards == 0 else inputs
  for size in (part, inputs):
    found = divisors(size, chosen.tile)
    if found:
      return found[-1]
  raise ValueError(
    f'{name}: no tile of {SMALLEST} to {chosen.tile} divides the inputs ({inputs}); give tile=0 '
    '(one scale per output), or leave this layer out.'
  )


def divisors(size: int, most: int) -> list[int]:
  """The divisors of a size from SMALLEST to `most`, rising."""
  return [n for n in range(SMALLEST, min(size, most) + 1) if size % n == 0]

"""Floating point operations of matrix products in a compiled program, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import math
import re

import numpy as np

from peftlab.plan import hlo


@dataclasses.dataclass(frozen=True)
class Window:
  """One spatial dimension of a convolution, as the window attribute of HLO tells it."""

  size: int = 1
  stride: int = 1
  low: int = 0
  input_step: int = 1
  kernel_step: int = 1


def product_flops(instruction: hlo.Instruction, operands: Sequence[hlo.Array]) -> int:
  """2 x multiplications of a dot or convolution; 0 of any other instruction.

  TPUs run a batched matrix product as a convolution whose window slides over a dilated input, most
  of it holes. As in XLA's own cost analysis only products of two real elements count.

  Args:
    instruction: of the program.
    operands: the shapes of its operands.
  """
  if instruction.opcode == 'dot':
    return _dot(instruction, operands)
  if instruction.opcode == 'convolution':
    return _convolution(instruction, operands)
  return 0


def _dot(instruction: hlo.Instruction, operands: Sequence[hlo.Array]) -> int:
  found = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes)
  dims = [int(d) for d in found[1].split(',') if d] if found else []
  return 2 * instruction.arrays[0].size * math.prod(operands[0].shape[d] for d in dims)


def _convolution(instruction: hlo.Instruction, operands: Sequence[hlo.Array]) -> int:
  attributes, result = instruction.attributes, instruction.arrays[0]
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', attributes)
  assert labels, instruction.name
  left, right, out = labels.groups()
  sizes = (
    dict(zip(names, array.shape, strict=True))
    for names, array in ((left, operands[0]), (right, operands[1]), (out, result))
  )
  inputs, kernel, outputs = sizes
  count = outputs['b'] * outputs['f'] * kernel['i']
  windows = _windows(attributes)
  for place, window in itertools.zip_longest(sorted(c for c in out if c.isdigit()), windows):
    count *= _meetings(inputs[place], outputs[place], window or Window(size=kernel[place]))
  # Groups need no factor: the kernel holds the inputs of one group, the result the batch of one.
  return 2 * count


def _meetings(inputs: int, outputs: int, window: Window) -> int:
  """How often, over all outputs of one dimension, the window meets a real element of the input."""
  span = (inputs - 1) * window.input_step + 1
  starts = np.arange(outputs) * window.stride - window.low
  at = np.add.outer(starts, np.arange(window.size) * window.kernel_step)
  return int(((at >= 0) & (at < span) & (at % window.input_step == 0)).sum())


def _windows(attributes: str) -> list[Window]:
  """'window={size=2x2 stride=2x2 pad=1_1x1_1}' -> one per dimension."""
  found = re.search(r'\bwindow=\{([^}]*)\}', attributes)
  if not found:
    return []
  given = dict(word.split('=') for word in found[1].split())
  sizes = given['size'].split('x')

  def each(word: str, default: str) -> list[int]:
    values = given[word].split('x') if word in given else [default] * len(sizes)
    return [int(value.partition('_')[0]) for value in values]

  rows = zip(
    map(int, sizes),
    each('stride', '1'),
    each('pad', '0'),
    each('lhs_dilate', '1'),
    each('rhs_dilate', '1'),
    strict=True,
  )
  return [Window(*row) for row in rows]

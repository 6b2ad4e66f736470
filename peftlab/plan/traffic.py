"""Bytes that the operations of a compiled program move: to and from main memory, between chips."""

from __future__ import annotations

import dataclasses
import math
import re

from peftlab.plan import hlo

# The kinds of collectives; what an asynchronous one starts is counted, not what it ends with.
KINDS = ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute', 'reduce-scatter')

# Only names, or a view of what is there: nothing moves.
_FREE = (
  'after-all',
  'bitcast',
  'call',
  'call-start',
  'conditional',
  'constant',
  'get-tuple-element',
  'iota',
  'optimization-barrier',
  'parameter',
  'partition-id',
  'replica-id',
  'tuple',
  'while',
)
# Custom calls that only tell the compiler something, or name a buffer.
FREE_CALLS = (
  'AllocateBuffer',
  'AssumeGatherIndicesInBound',
  'ConcatBitcast',
  'SPMDFullToShardShape',
  'SPMDShardToFullShape',
  'Sharding',
)
_VIEWS = ('bitcast', 'reshape')
_SLICES = ('dynamic-slice', 'gather', 'slice')
_UPDATES = ('dynamic-update-slice',)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation as it stands in the text.

  Attributes:
    kind: one of `KINDS`.
    group: how many devices take part in one of its groups.
    payload: bytes of the whole array that it gathers, reduces or moves, on one device.
    hidden: it runs beside other operations.
  """

  kind: str
  group: int
  payload: int
  hidden: bool

  @property
  def sent(self) -> float:
    """Bytes that a device sends with the best algorithm: a ring over its group."""
    share = (self.group - 1) / self.group
    if self.kind == 'all-reduce':
      return 2 * share * self.payload
    return self.payload if self.kind == 'collective-permute' else share * self.payload


def collective(
  where: hlo.Computation, instruction: hlo.Instruction, devices: int
) -> Collective | None:
  """The collective that an instruction is or starts, None where it is something else.

  Args:
    where: the computation of the instruction.
    instruction: any.
    devices: of the program, for a collective over all of them.
  """
  kind = instruction.opcode.removesuffix('-start')
  if kind not in KINDS or instruction.opcode.endswith('-done'):
    return None
  group = _group(instruction.attributes, devices)
  if kind == 'collective-permute':
    group = 2
  given = sum(where.instructions[o].nbytes for o in instruction.operands)
  hidden = instruction.opcode != kind
  payload = given
  if kind == 'all-gather':
    payload = given * group
  return Collective(kind, max(group, 1), payload, hidden)


def _group(attributes: str, devices: int) -> int:
  """How many devices a group has, in each of the ways in which the text says it."""
  if found := re.search(r'replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}', attributes):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
    return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'([^']+)'", found[2]))
  if found := re.search(r'replica_groups=\[(\d+),(\d+)\]<=', attributes):
    return int(found[2])
  if found := re.search(r'replica_groups=\{\{([\d,]*)\}', attributes):
    return len(found[1].split(','))
  return devices


def hbm_bytes(module: hlo.Module, where: hlo.Computation, instruction: hlo.Instruction) -> int:
  """Bytes that one operation reads from the main memory and writes to it.

  Of an operand that it only slices, the slices count; of a result that it updates in place, the
  update. What lies in the memory inside the core counts nothing, nor does a single number.
  """
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith(('-done', 'call-update', 'async-update')):
    return 0
  if instruction.target in FREE_CALLS:
    return 0
  operands = [where.instructions[name] for name in instruction.operands]
  if opcode == 'copy-start':  # (to, from, a flag)
    return sum(array.nbytes for array in instruction.arrays[:2] if array.in_hbm)
  if opcode == 'fusion':
    inner = module.computations[instruction.called('calls')]
    written, updated = _written(module, inner, instruction)
    read = (
      min(_read(module, inner, inner.parameters[number]), _in_hbm(operand))
      for number, operand in enumerate(operands)
      if number not in updated
    )
    return written + sum(read)
  if opcode in _SLICES:
    return _in_hbm(instruction) + (instruction.nbytes if _in_hbm(operands[0]) else 0)
  if opcode in _UPDATES:
    return _in_hbm(operands[1]) + (operands[1].nbytes if _in_hbm(instruction) else 0)
  return _in_hbm(instruction) + sum(map(_in_hbm, operands))


def _in_hbm(instruction: hlo.Instruction) -> int:
  return sum(array.nbytes for array in instruction.arrays if array.in_hbm and array.shape)


def _written(
  module: hlo.Module, inner: hlo.Computation, instruction: hlo.Instruction
) -> tuple[int, set[int]]:
  """(bytes that a fusion writes, the parameters that it updates in place)."""
  root = _behind_views(inner, inner.root)
  parts = [inner.instructions[o] for o in root.operands] if root.opcode == 'tuple' else [root]
  total, updated = 0, set()
  for array, part in zip(instruction.arrays, parts, strict=False):
    size, parameter = _update(module, inner, _behind_views(inner, part))
    if parameter is not None:
      updated.add(parameter)
    total += (array.nbytes if size is None else size) if array.in_hbm else 0
  return total, updated


def _update(
  module: hlo.Module, inner: hlo.Computation, part: hlo.Instruction
) -> tuple[int | None, int | None]:
  """(bytes of an update in place, the parameter that is updated); None for what it is not."""
  if part.opcode == 'fusion':
    deeper = module.computations[part.called('calls')]
    size, number = _update(module, deeper, _behind_views(deeper, deeper.root))
    target = None if number is None else inner.instructions[part.operands[number]]
  elif part.opcode in _UPDATES:
    size, target = inner.instructions[part.operands[1]].nbytes, inner.instructions[part.operands[0]]
  else:
    return None, None
  target = None if target is None else _behind_views(inner, target)
  if target is None or target.opcode != 'parameter':
    return size, None
  return size, int(target.given)


def _behind_views(where: hlo.Computation, instruction: hlo.Instruction) -> hlo.Instruction:
  while instruction.opcode in _VIEWS and instruction.operands:
    instruction = where.instructions[instruction.operands[0]]
  return instruction


def _read(module: hlo.Module, inner: hlo.Computation, value: hlo.Instruction) -> int:
  """Bytes that a fusion reads of one of its parameters, or of a view of it."""
  if value.root:
    return value.nbytes
  total = 0
  for user in inner.users[value.name]:
    sliced = user.operands[0] == value.name
    if user.opcode in _VIEWS:
      total += _read(module, inner, user)
    elif user.opcode in _SLICES and sliced:
      total += user.nbytes
    elif user.opcode in _UPDATES and sliced:
      continue
    elif user.opcode == 'fusion':
      deeper = module.computations[user.called('calls')]
      for number in (n for n, operand in enumerate(user.operands) if operand == value.name):
        whole = _behind_views(deeper, deeper.root) is deeper.parameters[number]
        inside = deeper.parameters[number]
        total += _read(module, inner, user) if whole else _read(module, deeper, inside)
    else:
      return value.nbytes
  return total

"""How often each loop of a compiled program runs, from its own start, step and condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import operator
import re

from peftlab.plan import hlo

MOST_TRIPS = 2**20

_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
  'LT': operator.lt,
  'LE': operator.le,
  'GT': operator.gt,
  'GE': operator.ge,
  'EQ': operator.eq,
  'NE': operator.ne,
}
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
  'add': operator.add,
  'subtract': operator.sub,
  'multiply': operator.mul,
  'maximum': max,
  'minimum': min,
}
_SAME = ('bitcast', 'convert', 'copy', 'copy-done', 'copy-start', 'reshape')

# A number, the numbers of a tuple (None: not known), or None.
Value = int | tuple | None


def trips(module: hlo.Module, loop: hlo.Instruction, where: hlo.Computation) -> int | None:
  """How often the body of a while loop runs; None where the program does not tell.

  Args:
    module: the program.
    loop: an instruction `while` of the computation `where`.
    where: see `loop`.
  """
  told = re.search(r'known_trip_count"?\s*[:=]\s*\{"?n"?:\s*"?(\d+)', loop.attributes)
  if told:
    return int(told[1])
  state = value(module, where, loop.operands[0], {})
  body = module.computations[loop.called('body')]
  condition = module.computations[loop.called('condition')]
  if not isinstance(state, tuple):
    return None
  for count in range(MOST_TRIPS):
    goes_on = value(module, condition, condition.root.name, {0: state})
    if not isinstance(goes_on, int):
      return None
    if not goes_on:
      return count
    changed = value(module, body, body.root.name, {0: state})
    if not isinstance(changed, tuple) or changed == state:
      return None
    state = changed
  return None


def value(
  module: hlo.Module, where: hlo.Computation, name: str, given: Mapping[int, Value]
) -> Value:
  """What an instruction gives, as far as it can be told: whole numbers and tuples of them.

  Args:
    module: the program.
    where: the computation that holds the instruction.
    name: of the instruction.
    given: what its parameters are, by number.
  """
  known: dict[str, Value] = {}

  def of(name: str) -> Value:
    if name not in known:
      known[name] = _one(module, where.instructions[name], of, given)
    return known[name]

  return of(name)


def _one(
  module: hlo.Module,
  instruction: hlo.Instruction,
  of: Callable[[str], Value],
  given: Mapping[int, Value],
) -> Value:
  opcode, operands = instruction.opcode, instruction.operands
  scalar = all(not array.shape for array in instruction.arrays)
  if opcode == 'parameter':
    return given.get(int(instruction.given))
  if opcode in ('tuple', 'optimization-barrier'):
    return tuple(of(o) for o in operands) if opcode == 'tuple' else of(operands[0])
  if opcode == 'get-tuple-element':
    inside = of(operands[0])
    return inside[instruction.index] if isinstance(inside, tuple) else None
  if opcode == 'fusion':
    inner = module.computations[instruction.called('calls')]
    return value(module, inner, inner.root.name, {n: of(o) for n, o in enumerate(operands)})
  if not scalar and opcode != 'copy-start':
    return None
  if opcode == 'constant':
    return _constant(instruction.given)
  if opcode in _SAME:
    return of(operands[0])
  if opcode == 'compare' or opcode in _ARITHMETIC:
    left, right = of(operands[0]), of(operands[1])
    if not isinstance(left, int) or not isinstance(right, int):
      return None
    if opcode == 'compare':
      found = re.search(r'direction=([A-Z]+)', instruction.attributes)
      return int(_COMPARE[found[1]](left, right)) if found else None
    return _ARITHMETIC[opcode](left, right)
  return None


def _constant(text: str) -> int | None:
  words = {'true': 1, 'false': 0}
  return words.get(text, int(text) if re.fullmatch(r'-?\d+', text) else None)

"""Reads the text of a compiled program (HLO) into computations and instructions."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

# Bits of one element; token and opaque hold nothing.
_BITS = {
  'pred': 8,
  's2': 2,
  'u2': 2,
  's4': 4,
  'u4': 4,
  'f4e2m1fn': 4,
  's8': 8,
  'u8': 8,
  's16': 16,
  'u16': 16,
  'f16': 16,
  'bf16': 16,
  's32': 32,
  'u32': 32,
  'f32': 32,
  's64': 64,
  'u64': 64,
  'f64': 64,
  'c64': 64,
  'c128': 128,
  'token': 0,
  'opaque': 0,
}
_ARRAY = re.compile(r'([a-z][a-z0-9]*)\[([0-9,<= ]*)\](\{[^}]*\})?')
_HEAD = re.compile(r'^(ENTRY )?%?([^\s(]+) \(.*\{\s*$')
_LINE = re.compile(r'^\s+(ROOT )?%?(\S+) = (.*)$')
_NAME = re.compile(r'%([^\s,()]+)')
_CALLED = re.compile(
  r'(?:calls|to_apply|body|condition|true_computation|false_computation)=%([^\s,}]+)'
)


@dataclasses.dataclass(frozen=True)
class Array:
  """The shape of an array, and whether it lies in the main memory (HBM) of the chip."""

  dtype: str
  shape: tuple[int, ...]
  in_hbm: bool = True

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(self.shape)

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'

  @property
  def nbytes(self) -> int:
    """Bytes without padding."""
    bits = _BITS.get(self.dtype, 8)  # every format of 8-bit floats has a name of its own
    return (self.size * bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name, opcode: as in the text.
    arrays: of its result, those of a tuple in a row.
    operands: names of instructions of the same computation.
    attributes: the rest of the line.
    given: what stands between the parentheses, where that is no name (a constant, a number).
    root: whether it is the result of its computation.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  attributes: str
  given: str = ''
  root: bool = False

  @functools.cached_property
  def calls(self) -> tuple[str, ...]:
    """Names of the computations that it names."""
    found = re.search(r'branch_computations=\{([^}]*)\}', self.attributes)
    if found:
      return tuple(_NAME.findall(found[1]))
    return tuple(_CALLED.findall(self.attributes))

  def called(self, word: str) -> str:
    """The computation that an attribute names: of a loop 'body' or 'condition'."""
    found = re.search(rf'\b{word}=%([^\s,]+)', self.attributes)
    assert found, f'{self.name} has no {word}'
    return found[1]

  @property
  def index(self) -> int:
    """Of a get-tuple-element."""
    found = re.search(r'\bindex=(\d+)', self.attributes)
    assert found, self.name
    return int(found[1])

  @property
  def target(self) -> str:
    """What a custom call names; '' of any other instruction."""
    return self.attributes.partition('custom_call_target="')[2].partition('"')[0]

  @property
  def cycles(self) -> int | None:
    """The compiler's own estimate, None where it has none."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    return int(found[1]) if found and int(found[1]) < 2**50 else None

  @property
  def nbytes(self) -> int:
    """Bytes of the result."""
    return sum(array.nbytes for array in self.arrays)


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions by name, in the order of the text."""

  name: str
  instructions: dict[str, Instruction]

  def __iter__(self) -> Iterator[Instruction]:
    return iter(self.instructions.values())

  @functools.cached_property
  def root(self) -> Instruction:
    """Its result."""
    return next(i for i in self if i.root)

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    """{number: parameter}."""
    return {int(i.given): i for i in self if i.opcode == 'parameter'}

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """{instruction: those that read it}."""
    found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
    for instruction in self:
      for operand in dict.fromkeys(instruction.operands):
        found[operand].append(instruction)
    return found


@dataclasses.dataclass(frozen=True)
class Module:
  """A program.

  Attributes:
    entry: the computation that is run.
    computations: all of them, by name.
  """

  entry: Computation
  computations: dict[str, Computation]


def parse(text: str) -> Module:
  """The program of a text as `compiled.as_text()` gives it.

  Raises:
    ValueError: there is no entry computation in it.
  """
  computations: dict[str, Computation] = {}
  entry: Computation | None = None
  current: dict[str, Instruction] | None = None
  for line in text.splitlines():
    if head := _HEAD.match(line):
      current = {}
      computations[head[2]] = Computation(head[2], current)
      entry = computations[head[2]] if head[1] else entry
    elif line.startswith('}'):
      current = None
    elif current is not None and (found := _LINE.match(line)):
      instruction = _instruction(found[2], found[3], root=bool(found[1]))
      current[instruction.name] = instruction
  if entry is None:
    raise ValueError('The text has no ENTRY computation; expected that of a compiled program.')
  return Module(entry, computations)


def arrays(text: str) -> tuple[Array, ...]:
  """The arrays of a type as HLO writes it; S(1) and above in a layout is not the HBM."""
  found = []
  for dtype, shape, layout in _ARRAY.findall(text):
    sizes = tuple(int(size.strip('<= ')) for size in shape.split(',') if size.strip())
    space = re.search(r'S\((\d+)\)', layout)
    found.append(Array(dtype, sizes, space is None or space[1] == '0'))
  return tuple(found)


def _instruction(name: str, text: str, *, root: bool) -> Instruction:
  cut = _closing(text, 0) + 1 if text.startswith('(') else text.index(' ')
  kind, rest = text[:cut], text[cut:].lstrip()
  opcode, _, _ = rest.partition('(')
  end = _closing(rest, len(opcode))
  inside = rest[len(opcode) + 1 : end]
  operands = tuple(_NAME.findall(inside)) if opcode != 'constant' else ()
  given = '' if operands else inside
  return Instruction(name, opcode, arrays(kind), operands, rest[end + 1 :], given, root)


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for place in range(start, len(text)):
    if text[place] == '(':
      depth += 1
    elif text[place] == ')':
      depth -= 1
      if not depth:
        return place
  raise ValueError(f'A parenthesis of the program is never closed: {text:.60}.')

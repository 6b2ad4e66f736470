"""What one run of a compiled program costs: the costs of its operations times their trip counts."""

from __future__ import annotations

import dataclasses

from peftlab.plan import flops, hlo, loops, traffic

# {(kind, group, array): [count, payload, sent, hidden]}
Rows = dict[tuple[str, int, str], list[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
  """All collectives of one kind and group size, or those of them on arrays of one shape.

  Attributes:
    kind, group: see `traffic.Collective`.
    array: 'bf16[4096,14336]', the largest array that one gives; '' where they are of many.
    count: how often one runs.
    payload, sent: bytes on one device, all together; see there.
    hidden: of `sent`, what runs beside other operations.
  """

  kind: str
  group: int
  count: int
  payload: int
  sent: float
  hidden: float
  array: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """The costs of one run on one device.

  Attributes:
    flops: of matrix products.
    cycles: that the compiler estimates for operations with a matrix product, and
    other_cycles: for all others.
    product_bytes: that operations with a matrix product move from and to the main memory, and
    other_bytes: all others, and
    moved_bytes: collectives.
    moved: the collectives by kind, group and array, largest first.
    loops: {loop: trips}, None where the program does not tell how often it runs.
    unknown: operations whose cost nobody knows (custom calls), by target.
  """

  flops: int = 0
  cycles: int = 0
  other_cycles: int = 0
  product_bytes: int = 0
  other_bytes: int = 0
  moved_bytes: int = 0
  moved: tuple[Moved, ...] = ()
  loops: dict[str, int | None] = dataclasses.field(default_factory=dict)
  unknown: dict[str, int] = dataclasses.field(default_factory=dict)

  @property
  def hbm_bytes(self) -> int:
    """Bytes from and to the main memory."""
    return self.product_bytes + self.other_bytes + self.moved_bytes

  @property
  def sent(self) -> float:
    """Bytes that a device sends to others."""
    return sum(m.sent for m in self.moved)

  @property
  def kinds(self) -> tuple[Moved, ...]:
    """The collectives by kind and group alone, largest first."""
    rows: Rows = {}
    for m in self.moved:
      key = (m.kind, m.group, '')
      rows = _added(rows, {key: [m.count, m.payload, m.sent, m.hidden]})
    return _moved(rows)


def costs(module: hlo.Module, devices: int = 1) -> Costs:
  """The costs of one run of a program.

  A loop costs its body as often as it runs, once where that is not known; of the branches of a
  conditional the one with most cycles counts.

  Args:
    module: the compiled program.
    devices: on which it runs.
  """
  tally = _Tally(module, devices)
  tally.walk(module.entry, 1)
  return tally.costs()


class _Tally:
  """Sums up costs while it walks through the computations that run."""

  def __init__(self, module: hlo.Module, devices: int):
    self._module, self._devices = module, devices
    names = ('flops', 'cycles', 'other_cycles', 'product_bytes', 'other_bytes', 'moved_bytes')
    self.sums = dict.fromkeys(names, 0)
    self._moved: Rows = {}
    self._loops: dict[str, int | None] = {}
    self._unknown: dict[str, int] = {}

  def costs(self) -> Costs:
    moved = _moved(self._moved)
    return Costs(**self.sums, moved=moved, loops=self._loops, unknown=self._unknown)

  def walk(self, where: hlo.Computation, times: int, *, hidden: bool = False) -> None:
    """Adds what a computation costs, so many times."""
    for instruction in where:
      if instruction.opcode == 'while':
        found = loops.trips(self._module, instruction, where)
        self._loops[instruction.name] = found
        body = self._module.computations[instruction.called('body')]
        self.walk(body, times * (1 if found is None else found), hidden=hidden)
      elif instruction.opcode == 'conditional':
        self._branch(instruction, times)
      elif instruction.opcode in ('call', 'call-start', 'async-start'):
        inner = self._module.computations[instruction.calls[0]]
        self.walk(inner, times, hidden=hidden or instruction.opcode != 'call')
      else:
        self._add(where, instruction, times, hidden)

  def _branch(self, instruction: hlo.Instruction, times: int) -> None:
    tallies = []
    for name in instruction.calls:
      tally = _Tally(self._module, self._devices)
      tally.walk(self._module.computations[name], times)
      tallies.append(tally)
    dearest = max(
      tallies, key=lambda t: (t.sums['cycles'] + t.sums['other_cycles'], t.sums['flops'])
    )
    for name, count in dearest.sums.items():
      self.sums[name] += count
    self._moved = _added(self._moved, dearest._moved)
    self._loops |= dearest._loops
    self._unknown |= dearest._unknown

  def _add(
    self, where: hlo.Computation, instruction: hlo.Instruction, times: int, hidden: bool
  ) -> None:
    moved = times * traffic.hbm_bytes(self._module, where, instruction)
    if self._send(where, instruction, times, hidden):
      self.sums['moved_bytes'] += moved
      return
    if instruction.opcode == 'fusion':  # a product may carry a collective that it hides
      inner = self._module.computations[instruction.called('calls')]
      for inside in inner:
        self._send(inner, inside, times, hidden=True)
    product = self._flops(where, instruction)
    self.sums['flops'] += times * product
    self.sums['product_bytes' if product else 'other_bytes'] += moved
    cycles, target = instruction.cycles, instruction.target
    if cycles is not None:
      self.sums['cycles' if product else 'other_cycles'] += times * cycles
    elif target and target not in traffic.FREE_CALLS:
      self._unknown[target] = self._unknown.get(target, 0) + times

  def _send(
    self, where: hlo.Computation, instruction: hlo.Instruction, times: int, hidden: bool
  ) -> bool:
    """Adds the collective that an instruction is; whether it is one."""
    found = traffic.collective(where, instruction, self._devices)
    if found is None:
      return False
    row = [1.0, float(found.payload), found.sent, found.sent if found.hidden or hidden else 0.0]
    largest = max(instruction.arrays, key=lambda array: array.nbytes)
    key = (found.kind, found.group, str(largest))
    self._moved = _added(self._moved, {key: [times * number for number in row]})
    return True

  def _flops(self, where: hlo.Computation, instruction: hlo.Instruction) -> int:
    """Of an instruction, those inside a fusion included."""
    if instruction.opcode == 'fusion':
      inner = self._module.computations[instruction.called('calls')]
      return sum(self._flops(inner, i) for i in inner)
    if instruction.opcode not in ('convolution', 'dot'):
      return 0
    operands = [where.instructions[o].arrays[0] for o in instruction.operands]
    return flops.product_flops(instruction, operands)


def _added(rows: Rows, more: Rows) -> Rows:
  found = dict(rows)
  for key, row in more.items():
    found[key] = [a + b for a, b in zip(found.get(key, [0.0] * len(row)), row, strict=True)]
  return found


def _moved(rows: Rows) -> tuple[Moved, ...]:
  found = [
    Moved(
      kind=kind,
      group=group,
      array=array,
      count=int(count),
      payload=int(payload),
      sent=sent,
      hidden=hidden,
    )
    for (kind, group, array), (count, payload, sent, hidden) in rows.items()
  ]
  return tuple(sorted(found, key=lambda m: -m.sent))

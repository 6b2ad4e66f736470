"""A pack in training: slots that trials take, leave when they end, and give to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import time
from typing import Any

import jax
import numpy as np

from peftlab import _attach, _padded, _parts
from peftlab.sweep import items, numbers, packing, program
from peftlab.sweep.member import Member, Slot, metrics_of
from peftlab.train import devices
from peftlab.train.loop import Flag
from peftlab.train.opt_state import init_opt_state, training_parts

Say = Callable[[str], None]


def template_of(members: Sequence[Member]) -> program.Template:
  """What the trials of a pack have in common; each must be a run on the same base."""
  first = members[0]
  adapters = [member.experiment.adapter for member in members]
  carrier = packing.carrier(adapters)
  carrier = numbers.numbered(carrier, packing.numbers(adapters))
  experiment = first.experiment
  model, _ = _attach.attach(
    first.base_model,
    experiment.spread(carrier),
    **experiment.targets,
    indivisible=experiment.mesh.indivisible,
    name='pack',
  )
  parts = training_parts(model, recording=experiment.train.load_balancing > 0)
  padded = [p for p in _padded.paddings(model) if '.adapters.' in p.path]
  if padded:
    raise ValueError(
      f"mesh.indivisible is 'pad', and a pack cannot pad an adapter: {padded[0]}. Run these trials "
      "one by one (--pack=off), or with axes that divide, or with 'drop'."
    )
  options = tuple(dict.fromkeys(member.options for member in members))
  return program.Template(
    parts=parts,
    evaluated=_parts.evaluation_parts(model).replace(adapter={}),
    state=init_opt_state(parts, options[0], learning_rate=0.0),
    variants=options,
    lengths=program.padded_lengths(parts, [member.tree[0] for member in members]),
    mesh=first.mesh,
  )


class Pack:
  """Some trials in training as one program.

  Attributes:
    template: what they share.
    sizes: of the programs that were compiled, in turn.
    updates: of the pack, and `seconds` from the first to the last.
  """

  def __init__(
    self,
    members: Sequence[Member],
    *,
    size: int = 0,
    most: int = 64,
    ended: Callable[[Member, Pack], None],
    second: Sequence[Any] = (),
    shrink: bool | None = None,
    say: Say = print,
  ):
    """Compiles the program and fills its slots.

    Args:
      members: the trials; those beyond the size wait for a free slot.
      size: of the pack; 0: as many as memory allows, by the compiler's figure.
      most: trials at once, at most.
      ended: is called with each trial that has ended, once its last arrays are in it.
      second: batches of another text, on which the loss of each trial is taken at its end.
      shrink: whether a pack without waiting trials is compiled anew for those that are left; None:
        where that takes less time than it saves.
      say: takes lines for a person.
    """
    self.template = template_of(members)
    self.sizes: list[int] = []
    self.updates, self.seconds = 0, 0.0
    self._ended, self._shrink, self._say = ended, shrink, say
    self._compile_seconds = 0.0
    self._times: list[float] = []
    self._waiting = list(members)
    self._pending: Any = None
    batch = members[0].batches.rows.batch(members[0].batches.indices(0))
    wanted = min(len(members), size or most)
    self._program = self._compile(batch, wanted, fixed=bool(size))
    taken = [self._waiting.pop(0) for _ in range(self._program.size)]
    self._slots = [Slot(member, batch) for member in taken]
    self._trees = program.stack([self._padded(member) for member in taken])
    self._held_out: list[Any] | None = None
    self._second = self._placed(second)

  def _compile(self, batch: Any, size: int, *, fixed: bool) -> program.Program:
    started = time.monotonic()
    if fixed:
      made = program.Program(self.template, size, batch)
    else:
      made = program.choose_size(self.template, batch, most=size)
    self._compile_seconds = time.monotonic() - started
    self.sizes.append(made.size)
    self._say(
      f'pack: {made.size} trials in one program, {made.nbytes / 2**20:,.0f} MiB with the base, '
      f'compiled in {self._compile_seconds:.1f} s'
    )
    return made

  def _padded(self, member: Member) -> program.Trees:
    adapter, state = member.tree
    varied = packing.numbers_of(self.template.parts.adapter, member.experiment.adapter)
    adapter = _parts.nest({**_parts.flat(adapter), **varied})
    return program.one(self.template, adapter, state, member.options)

  @property
  def members(self) -> list[Member]:
    """The trials that have a slot."""
    return [slot.member for slot in self._slots if slot.member is not None]

  @property
  def seconds_per_update(self) -> float | None:
    """Of the middle one of the last updates; None before the third."""
    return float(np.median(self._times)) if len(self._times) > 2 else None

  @property
  def nbytes(self) -> int:
    """Bytes of the base and of all trials' arrays, on all devices."""
    return _parts.nbytes([self.template.parts.base, self._trees])

  def train(self, stop: Flag) -> None:
    """Trains all trials to their end, or until told to stop; then what is left is saved."""
    for member in [*self.members, *self._waiting]:
      member.packed = max(member.packed, self._program.size)
    while not stop.is_set and self.members:
      self._free()
      if not self.members:
        break
      self._update()
    self._settle()
    self._free(refill=False)
    for index, slot in enumerate(self._slots):
      if slot.member is not None:
        self._leave(index, preempted=True)
    for member in self._waiting:
      member.end(preempted=True)
      self._ended(member, self)

  def _update(self) -> None:
    """Starts one update, and records the one before while it runs."""
    started = time.monotonic()
    for slot in self._slots:
      if slot.member is not None:
        slot.batch = next(slot.member.batches)
    self._trees, values = self._program(self._trees, [slot.batch for slot in self._slots])
    self._settle()
    self._pending = values
    for slot in self._slots:
      if slot.member is not None:
        slot.member.step += 1
    self.updates += 1
    if any(m.evaluates or m.saves or m.done for m in self.members):
      self._settle()
      self._evaluate([i for i, s in self._running() if s.evaluates])
      for index, member in self._running():
        if member.saves:
          self._fetch(index)
          member.save()
    self._times.append(time.monotonic() - started)
    self.seconds += self._times[-1]

  def _running(self) -> list[tuple[int, Member]]:
    return [
      (i, slot.member)
      for i, slot in enumerate(self._slots)
      if slot.member is not None and slot.member.status == 'running'
    ]

  def _settle(self) -> None:
    """Waits for the update that was started last, and records it for each trial."""
    if self._pending is None:
      return
    values, self._pending = jax.device_get(self._pending), None
    for index, slot in enumerate(self._slots):
      if slot.member is not None and slot.member.status == 'running':
        slot.member.record_step(metrics_of(values, index))

  def _evaluate(self, indices: Sequence[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """The held-out rows of some trials, {slot: (sums, tokens)}; their losses are recorded."""
    if not indices:
      return {}
    if self._held_out is None:
      self._held_out = self._placed(self.members[0].record.text.held_out)
    found = self._rows(self._held_out, indices)
    for index, (mine, counts) in found.items():
      member = self._slots[index].member
      if member is not None and not member.record.has('eval', member.step):
        member.record.held_out(items.mean(mine, counts), member.step)
    return found

  def _placed(self, batches: Sequence[Any]) -> list[Any]:
    return [devices.place_batch(batch, self.template.mesh) for batch in batches]

  def _rows(
    self, batches: Sequence[Any], indices: Sequence[int]
  ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """{slot: (summed losses, tokens) of each row} for some slots."""
    rows = [program.row_losses(self.template, self._trees, batch) for batch in batches]
    sums, tokens = (np.concatenate(x, axis=-1) for x in zip(*jax.device_get(rows), strict=True))
    return {i: (sums[i][tokens > 0], tokens[tokens > 0]) for i in indices}

  def _fetch(self, index: int) -> None:
    """Gives a trial its arrays."""
    member = self._slots[index].member
    assert member is not None
    trees = (self._trees.adapter, self._trees.state)
    member.put(*program.take(trees, np.int32(index)))

  def _leave(self, index: int, *, preempted: bool = False) -> None:
    """A trial ends and its slot is free."""
    member = self._slots[index].member
    assert member is not None
    self._fetch(index)
    member.end(preempted=preempted)
    self._slots[index].member = None
    self._ended(member, self)

  def _free(self, *, refill: bool = True) -> None:
    """Trials that have ended leave; those that wait take their slots; or the pack shrinks."""
    over = [i for i, s in enumerate(self._slots) if s.member is not None and s.member.done]
    if not over:
      return
    self._settle()
    good = {i: member for i, member in self._running() if i in over}
    for index, found in self._evaluate(list(good)).items():
      good[index].items = found
    if self._second and good:
      for index, (sums, tokens) in self._rows(self._second, list(good)).items():
        good[index].second_loss = items.mean(sums, tokens)
    for index in over:
      self._leave(index)
    if not refill:
      return
    for index in over:
      if self._waiting:
        member = self._waiting.pop(0)
        self._slots[index].member = member
        self._trees = program.put(self._trees, np.int32(index), self._padded(member))
    self._make_smaller()

  def _make_smaller(self) -> None:
    """Compiles a program for the trials that are left, where that pays."""
    left = [i for i, slot in enumerate(self._slots) if slot.member is not None]
    if not left or len(left) == len(self._slots) or self._shrink is False:
      return
    steps = max(m.experiment.train.steps - m.step for m in self.members)
    each = float(np.median(self._times[-20:])) if self._times else 0.0
    saved = steps * each * (1 - len(left) / len(self._slots))
    if self._shrink is None and saved < 1.5 * self._compile_seconds:
      return
    self._trees = program.select(self._trees, left)
    self._slots = [self._slots[i] for i in left]
    self._program = self._compile(self._slots[0].batch, len(left), fixed=True)
    self._times.clear()

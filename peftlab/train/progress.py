"""What a person sees of a run while it trains: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
import itertools
import statistics
import sys
import time
from typing import Any

from peftlab import _processes

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
  """Steps done of all steps, the last loss of each run, tokens per second, time left."""

  def __init__(self, total: int, *, done: int = 0, say: Callable[[str], None] = print):
    """Starts the clock.

    Args:
      total: steps of all runs together.
      done: how many of them were done before.
      say: takes the lines where there is no terminal.
    """
    self._total, self._done, self._say = total, done, say
    self._losses: dict[str, str] = {}
    self._marks: list[tuple[float, int]] = []  # (time, tokens of the step), the first left out
    self._said = 0.0
    shown = sys.stderr.isatty() and _processes.is_first()
    self._bar = _bar(total, done) if shown else None

  def update(self, name: str, *, loss: float, tokens: int) -> None:
    """One more step is done.

    Args:
      name: of the run.
      loss: of the step.
      tokens: that went through the model in it.
    """
    self._done += 1
    self._losses[name] = f'{loss:.3f}'
    self._marks.append((time.monotonic(), tokens))
    if self._bar is not None:
      self._bar.set_postfix(self._postfix(), refresh=False)
      self._bar.update()
      return
    now = time.monotonic()
    if now - self._said >= _SECONDS_BETWEEN_LINES or self._done == self._total:
      self._said = now
      losses = ', '.join(f'{n} loss {v}' for n, v in self._losses.items())
      rate = self._postfix()['tok/s']
      self._say(f'step {self._done}/{self._total}: {losses}, {rate} tokens/s, {self._left()} left')

  @property
  def tokens_per_second(self) -> float | None:
    """Of the middle step: one that compiles or waits for an evaluation does not count.

    None before the third step.
    """
    if len(self._marks) < 3:
      return None
    times, tokens = zip(*self._marks, strict=True)
    seconds = statistics.median(b - a for a, b in itertools.pairwise(times))
    return statistics.median(tokens) / max(seconds, 1e-9)

  def close(self) -> None:
    """Leaves the bar as it is."""
    if self._bar is not None:
      self._bar.close()

  def _postfix(self) -> dict[str, str]:
    rate = self.tokens_per_second
    return {**self._losses, 'tok/s': '-' if rate is None else f'{rate:,.0f}'}

  def _left(self) -> str:
    recent = self._marks[-20:]
    if len(recent) < 2:
      return 'unknown time'
    each = (recent[-1][0] - recent[0][0]) / (len(recent) - 1)
    return duration(each * (self._total - self._done))


def _bar(total: int, done: int) -> Any:
  import tqdm

  return tqdm.tqdm(total=total, initial=done, unit='step', dynamic_ncols=True, smoothing=0.1)


def duration(seconds: float) -> str:
  """75.2 -> '1:15', 8100 -> '2:15:00'."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'


def table(rows: list[tuple[str, ...]]) -> str:
  """Rows of cells as text; the first column is left-aligned, the others right-aligned."""
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = []
  for row in rows:
    cells = [
      c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
    ]
    lines.append('  '.join(cells).rstrip())
  return '\n'.join(lines)

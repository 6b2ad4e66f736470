"""The numbers of a run, for summary.json and for the table at its end."""

from __future__ import annotations

from collections.abc import Sequence
import resource
from typing import Any

import jax

from peftlab import _parts
from peftlab.train import progress
from peftlab.train.run import Run

Summary = dict[str, Any]


def summarize(run: Run, *, tokens_per_second: float | None = None) -> Summary:
  """The numbers of one run; losses in nats per token, sizes in bytes, shares in [0, 1]."""
  records = run.record.read()
  losses = {r['step']: r['loss'] for r in records if r['kind'] == 'eval'}
  trained = [r for r in records if r['kind'] == 'train']
  after = losses.get(run.step) if run.status == 'ok' else None
  before = losses.get(0)
  return {
    'name': run.experiment.name,
    'status': run.status,
    'steps': run.step,
    'held_out_before': before,
    'held_out_after': after,
    'drop': None if before is None or after is None else before - after,
    'train_loss': trained[-1]['loss'] if trained else None,
    'skipped': run.skipped,
    'tokens_per_second': tokens_per_second,
    'bytes': run.bytes,
    'trainable': run.report.trainable,
    'coverage': run.report.coverage,
    'compiles': run.compiled.traces,
    'base_identity': _parts.assert_base_shared(run.base_model, run.parts),
  }


def is_summary(value: Any) -> bool:
  """Whether a value, read from a file, has what `table` shows."""
  names = {'name', 'status', 'steps', 'held_out_before', 'held_out_after', 'drop', 'bytes'}
  return isinstance(value, dict) and names <= set(value) and isinstance(value['bytes'], dict)


def memory() -> dict[str, int]:
  """Bytes of all live arrays (each buffer once), and the most that the process ever held."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return {'live': _parts.nbytes(jax.live_arrays()), 'process_peak': peak}


def show(value: Any, digits: int = 4) -> str:
  """A number for a table; '-' for None."""
  if value is None:
    return '-'
  return f'{value:.{digits}f}' if isinstance(value, float) else f'{value:,}'


def table(summaries: Sequence[Summary]) -> str:
  """The table at the end of some runs."""
  head = ('adapter', 'status', 'steps', 'held out', 'after', 'drop', 'bytes', 'optimizer')
  rows: list[tuple[str, ...]] = [head]
  for s in summaries:
    numbers = [show(s[k]) for k in ('steps', 'held_out_before', 'held_out_after', 'drop')]
    sizes = [show(s['bytes'][k]) for k in ('adapter', 'optimizer')]
    rows.append((s['name'], s['status'], *numbers, *sizes))
  return progress.table(rows)

"""List the registered adapter types with what they claim."""

from __future__ import annotations

from absl import flags

from peftlab import _claims, _registry
from peftlab.cli import _flags, _help
from peftlab.train import progress

# What a column shows -> its head.
COLUMNS = {
  'goes_on': 'goes on',
  'identity_at_start': 'starts as base',
  'mergeable': 'merges',
  'needs_weight': 'needs weight',
  'shared': 'shared',
  'divides': 'divides',
  'embeddings': 'embeddings',
  'norms': 'norms',
  'experts': 'experts',
  'conv': 'conv',
  'quantized_base': 'quantized',
  'mixed_batch': 'mixed batch',
  'trainable': 'trainable',
}


def _define(values: flags.FlagValues) -> None:
  del values


def run(argv: list[str]) -> int:
  """`peftlab adapters`."""
  if _help.wanted(argv):
    print(f'peftlab adapters\n\n{__doc__}')
    return 0
  _flags.parse_plain(argv, _define)
  print(table())
  return 0


def table() -> str:
  """The table of all registered types; `trainable`: of a linear layer 48 -> 32, rank 4."""
  rows: list[tuple[str, ...]] = [('adapter', *COLUMNS.values())]
  for name in _registry.adapters.names():
    claims = _claims.row(_claims.small(_registry.adapters.get(name)))
    rows.append((name, *(_shown(claims[column]) for column in COLUMNS)))
  return progress.table(rows)


def _shown(value: object) -> str:
  return {True: 'yes', False: '-'}.get(value, str(value)) if isinstance(value, bool) else str(value)

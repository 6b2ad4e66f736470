"""List the registered adapter types with what they claim."""

from __future__ import annotations

from absl import flags

from peftlab import _registry
from peftlab._adapter import Adapter
from peftlab.cli import _flags, _help
from peftlab.train import progress

CLAIMS = ('identity_at_start', 'mergeable', 'embeddings')


def _define(values: flags.FlagValues) -> None:
  del values


def run(argv: list[str]) -> int:
  """`peftlab adapters`."""
  if _help.wanted(argv):
    print(f'peftlab adapters\n\n{__doc__}')
    return 0
  _flags.parse_plain(argv, _define)
  rows: list[tuple[str, ...]] = [('adapter', *(claim.replace('_', ' ') for claim in CLAIMS), '')]
  for name in _registry.adapters.names():
    cls = _registry.adapters.get(name)
    claims = ['yes' if getattr(cls, claim) else 'no' for claim in CLAIMS]
    rows.append((name, *claims, _doc(cls)))
  print(progress.table(rows))
  return 0


def _doc(cls: type[Adapter]) -> str:
  return (cls.__doc__ or '').strip().splitlines()[0]

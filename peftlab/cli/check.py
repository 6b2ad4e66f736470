"""Put adapter types through the conformance suite: FILE.py or NAME [--only=...]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import os
import typing

from absl import flags

from peftlab.cli import _flags, _help

if typing.TYPE_CHECKING:
  from peftlab import _adapter
  from peftlab.testing import suite

DEVICES = 8
SHOWN = {'pass': 'pass', 'fail': 'FAIL', 'n.a.': 'n.a.'}


def _define(values: flags.FlagValues) -> None:
  text = 'names of properties or groups, separated by commas; can be repeated'
  flags.DEFINE_multi_string('only', [], text, flag_values=values)


def run(argv: list[str]) -> int:
  """`peftlab check`: 0 every property holds, 1 one does not, 2 no adapter type to check."""
  values = flags.FlagValues()
  _define(values)
  if _help.wanted(argv):
    usage = 'peftlab check FILE.py|NAME [--only=NAME,...]'
    print(f'{usage}\n\n{__doc__}\n\n{_help.show_flags(values)}')
    print(f'\n{_listing()}')
    return 0
  given, others = _given(argv)
  only = [n for o in _flags.parse_plain(others, _define).only for n in o.split(',') if n]
  from peftlab import testing

  testing.use_cpu_devices(DEVICES)
  testing.select(only)
  failed = False
  for name, kind in _types(given).items():
    with testing.quick_compiles():
      failed |= _show(name, kind.__name__, testing.results(kind, only=only))
  return int(failed)


def _types(given: str) -> dict[str, type[_adapter.Adapter]]:
  """The types that a file registers, or the registered one of that name."""
  from peftlab import _plugin_file, _registry

  if given.endswith('.py') or os.sep in given or os.path.exists(given):
    return _plugin_file.load_plugin(given)
  return {given: _registry.adapters.get(given)}


def _given(argv: list[str]) -> tuple[str, list[str]]:
  """(the one argument that is no flag, the flags)."""
  values = {i + 1 for i, argument in enumerate(argv) if argument in ('--only', '-only')}
  files = [a for i, a in enumerate(argv) if not a.startswith('-') and i not in values]
  if len(files) != 1:
    given = ' '.join(files) or 'none'
    raise ValueError(
      'Give one plugin file or the name of a registered type, peftlab check FILE.py|NAME; given: '
      f'{given}.'
    )
  return files[0], [a for a in argv if a != files[0]]


def _listing() -> str:
  from peftlab.testing import suite

  rows = [(p.group, p.name, p.line) for p in suite.properties()]
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  return '\n'.join(f'  {g:<{widths[0]}}  {n:<{widths[1]}}  {line}' for g, n, line in rows)


def _show(name: str, kind: str, results: Iterator[suite.Result]) -> bool:
  """Prints the table of one adapter type as it comes; whether a property fails."""
  from peftlab.testing import suite

  groups, names = zip(*((p.group, p.name) for p in suite.properties()), strict=True)
  left, right = max(map(len, groups)), max(map(len, names))
  print(f'{name} ({kind})', flush=True)
  done = []
  for result in results:
    claim = result.property
    line = (
      f'  {claim.group:<{left}}  {claim.name:<{right}}  {SHOWN[result.status]}  {result.reason}'
    )
    print(line.rstrip(), flush=True)
    done.append(result)
  print(f'  {_summary(done)}\n', flush=True)
  return any(result.status == 'fail' for result in done)


def _summary(results: Iterable[suite.Result]) -> str:
  """'34 properties: 30 hold, 3 do not apply, 1 fails: fuse_equals_apply (20 s).'."""
  results = list(results)

  def count(status: str) -> int:
    return sum(r.status == status for r in results)

  failed = ', '.join(r.property.name for r in results if r.status == 'fail')
  seconds = sum(r.seconds for r in results)
  fails = f'{count("fail")} fail: {failed}' if failed else '0 fail'
  return (
    f'{len(results)} properties: {count("pass")} hold, {count("n.a.")} do not apply, {fails} '
    f'({seconds:.0f} s).'
  )

"""Writes requirements/lock.txt: one exact version of every package that peftlab[dev] needs.

`make lock` resolves anew for the newest versions that pyproject.toml allows. The lock is installed
with `--no-deps`, so what it does not name is not there.
"""

import json
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_LOCK = _ROOT / 'requirements' / 'lock.txt'
_HEADER = '# Every package that peftlab[dev] needs, at one version. Made by `make lock`.\n'


def resolved() -> list[str]:
  """Returns `name==version` for the closure of peftlab[dev], by pip's own resolver."""
  command = [sys.executable, '-m', 'pip', 'install', '--dry-run', '--ignore-installed', '--quiet']
  result = subprocess.run(
    [*command, '--report', '-', '.[dev]'], cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True
  )
  found = [row['metadata'] for row in json.loads(result.stdout)['install']]
  pins = [f'{row["name"].lower()}=={row["version"]}' for row in found if row['name'] != 'peftlab']
  return sorted(pins)


def main() -> None:
  """Resolves and writes the lock."""
  _LOCK.write_text(_HEADER + '\n'.join(resolved()) + '\n')


if __name__ == '__main__':
  main()

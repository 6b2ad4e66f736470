"""`peftlab check`: a plugin file from anywhere, its table, exit codes, bad input in one line."""

import os
import pathlib
import subprocess
import sys

import pytest

from peftlab import _registry, cli

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

HEAD = """
import dataclasses
import peftlab

@peftlab.register_adapter('{name}')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift(peftlab.Adapter):
  mergeable = {mergeable}

  def slots(self):
    return {{'v': peftlab.Slot(dims='out')}}

  def apply(self, x, base, p):
    return base(x) + p.v
"""


@pytest.fixture(autouse=True)
def own_registry():
  """What a test registers is gone after it."""
  _registry.adapters.names()
  kept, modules = dict(_registry.adapters._found), set(sys.modules)
  yield
  _registry.adapters._found.clear()
  _registry.adapters._found.update(kept)
  for name in set(sys.modules) - modules:
    if name.startswith('plugin_file.'):
      del sys.modules[name]


def plugin(folder, text='', *, name='outside_shift', mergeable=False):
  file = folder / 'shift.py'
  file.write_text(text or HEAD.format(name=name, mergeable=mergeable))
  return str(file)


def check(*argv):
  return cli.main(['check', *argv])


def test_an_honest_plugin_exits_0(tmp_path, capsys):
  code = check(plugin(tmp_path), '--only=contract,fuse_equals_apply')
  told = capsys.readouterr().out.splitlines()
  assert code == 0
  assert told[0] == 'outside_shift (Shift)'
  assert told[1].split() == ['contract', 'slots_are_stable', 'pass']
  assert told[10].split(maxsplit=3)[1:] == ['fuse_equals_apply', 'n.a.', 'mergeable is False']
  assert '10 properties: 7 hold, 3 do not apply, 0 fail' in told[11]
  held = [line for line in told[1:11] if ' pass' in line]
  assert len(held) == 7
  assert len({line.index('pass') for line in held}) == 1, 'the column is not straight'


def test_a_broken_plugin_exits_1_and_names_the_property(tmp_path, capsys):
  code = check(plugin(tmp_path, mergeable=True), '--only=fuse_equals_apply', '--only=keeps_shape')
  told = capsys.readouterr().out
  assert code == 1
  assert 'fuse_equals_apply                     FAIL  ValueError: Shift cannot be merged' in told
  assert '1 fail: fuse_equals_apply' in told


def test_plugins_of_peftlab_are_checked_by_their_file(capsys):
  assert check(str(ROOT / 'plugins' / 'lora.py'), '--only=fuse_equals_apply') == 0
  assert capsys.readouterr().out.startswith('lora (LoRA)')


def test_a_registered_type_is_checked_by_its_name(capsys):
  assert check('miss', '--only=fuse_equals_apply') == 0
  assert capsys.readouterr().out.startswith('miss (MiSS)')


def test_the_command_brings_its_own_devices(tmp_path):
  """In a fresh process, from another folder, whatever platform and flags it was given."""
  environment = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'JAX_PLATFORMS')}
  command = [sys.executable, '-m', 'peftlab', 'check', plugin(tmp_path), '--only=sharded']
  path = os.pathsep.join([str(ROOT), environment.get('PYTHONPATH', '')])
  environment |= {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path}
  done = subprocess.run(
    command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
  )
  assert (done.returncode, done.stderr) == (0, '')
  assert '2 properties: 2 hold' in done.stdout


BAD = {
  'none given': ([], 'Give one plugin file or the name of a registered type, peftlab check '),
  'two given': (['a.py', 'b.py'], 'Give one plugin file or the name of a registered type, peftlab'),
  'no such type': (['lorra'], "No adapter 'lorra'; did you mean 'lora'?"),
  'no such file': (['{folder}/shfit.py'], "No Python file '{folder}/shfit.py'; did you mean"),
  'a folder': (['{folder}'], "No Python file '{folder}'"),
  'no property': (['{file}', '--only=fuse'], "No property 'fuse'"),
  'no flag': (['{file}', '--onyl=merging'], "No flag '--onyl'; did you mean '--only'?"),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_arguments_are_told_in_one_line(case, tmp_path, capsys):
  argv, expected = BAD[case]
  names = {'folder': str(tmp_path), 'file': plugin(tmp_path)}
  assert check(*(a.format(**names) for a in argv)) == 2
  told = capsys.readouterr().err
  assert told.startswith('peftlab: ' + expected.format(**names)), told
  assert told.count('\n') == 1


BAD_FILES = {
  'no adapter': ('x = 1\n', 'registers no adapter type; put @peftlab.register_adapter'),
  'syntax': ('x = 1\nx = (\n', "shift.py', line 2: '(' was never closed."),
  'import': ('import os\nimport nowhere_to_be_found\n', 'line 2: ModuleNotFoundError: No module'),
  'any error': ('\n\n1 / 0\n', 'line 3: ZeroDivisionError: division by zero.'),
  'an exit': ('import sys\nsys.exit(3)\n', 'line 2: SystemExit: 3.'),
  'no dataclass': (
    "import peftlab\n@peftlab.register_adapter('x')\nclass X(peftlab.Adapter):\n  pass\n",
    "line 2: The adapter 'x'",
  ),
  'taken': (
    HEAD.format(name='lora', mergeable=False),
    "The adapter name 'lora' is taken by peftlab.plugins.lora.LoRA, so plugin_file.shift.Shift",
  ),
  'a bad name': (HEAD.format(name='a b', mergeable=False), "The adapter name 'a b' is not a word"),
}


@pytest.mark.parametrize('case', BAD_FILES)
def test_a_bad_file_is_told_in_one_line(case, tmp_path, capsys):
  text, expected = BAD_FILES[case]
  before = dict(_registry.adapters._found)
  assert check(plugin(tmp_path, text)) == 2
  told = capsys.readouterr().err
  assert expected in told, told
  assert told.count('\n') == 1
  assert {n: k for n, k in _registry.adapters._found.items() if n in before} == before


def test_help_lists_every_property(capsys):
  from peftlab import testing

  assert check('--help') == 0
  told = capsys.readouterr().out
  for claim in testing.properties():
    assert f'{claim.name} ' in told
    assert claim.line in told

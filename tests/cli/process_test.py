"""What ends a command from outside: no memory, no reader, no right to write, Ctrl-C; warnings."""

import os
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

from peftlab import cli
from peftlab.cli import _memory, adapters


def fails_with(monkeypatch, error):
  def run(argv):
    del argv
    if isinstance(error, BaseException):
      raise error
    return error()

  monkeypatch.setattr(adapters, 'run', run)


OUT_OF_MEMORY = {
  'xla': lambda: jax.numpy.zeros((10**13,)).block_until_ready(),
  'numpy': lambda: np.ones((10**15,), np.float32),
}


@pytest.mark.parametrize('name', OUT_OF_MEMORY)
def test_what_memory_does_not_hold_is_told_in_one_line(name, monkeypatch, capsys):
  fails_with(monkeypatch, OUT_OF_MEMORY[name])
  assert cli.main(['adapters']) == 2
  told = capsys.readouterr().err
  asked = {'xla': '37252.9 GiB', 'numpy': '3.55 PiB'}[name]  # 4e13 and 4e15 bytes
  assert told.startswith(f'peftlab: There is not enough memory: {asked} were asked for at once, ')
  assert told.count('\n') == 1


@pytest.mark.parametrize(
  ('text', 'asked'),
  (
    ('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.', '4.0 KiB'),
    ('RESOURCE_EXHAUSTED: Failed to allocate request for 1.20GiB (1288490189B)', 'more'),
    ('RESOURCE_EXHAUSTED: Ran out of memory trying to allocate 1.20GiB (rounded)', '1.20GiB'),
  ),
)
def test_other_words_for_it_are_known(text, asked):
  line = _memory.told(RuntimeError(text))
  assert line.startswith(f'There is not enough memory: {asked} were asked for at once')


def test_another_error_of_the_runtime_keeps_its_traceback(monkeypatch):
  fails_with(monkeypatch, RuntimeError('INTERNAL: deep below'))
  with pytest.raises(RuntimeError, match='deep below'):
    cli.main(['adapters'])


def test_an_error_of_the_system_is_one_line(monkeypatch, capsys):
  fails_with(monkeypatch, OSError(28, 'No space left on device', '/full/file'))
  assert cli.main(['adapters']) == 2
  assert capsys.readouterr().err == "peftlab: No space left on device '/full/file'.\n"


def test_an_interrupt_is_130(monkeypatch, capsys):
  fails_with(monkeypatch, KeyboardInterrupt())
  assert cli.main(['adapters']) == 130
  assert capsys.readouterr().err == 'peftlab: interrupted\n'


def test_a_reader_that_goes_away_is_no_error():
  command = f'{sys.executable} -m peftlab train --help | head -1; exit ${{PIPESTATUS[0]}}'
  done = subprocess.run(
    ['bash', '-c', command],
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONUNBUFFERED': '1'},
    check=False,
    timeout=60,
  )
  assert done.stderr == ''
  assert done.returncode in (0, 141)
  assert done.stdout.startswith('peftlab train')


def test_a_warning_is_one_line_without_a_place_in_the_code(monkeypatch, capsys):
  fails_with(monkeypatch, lambda: warnings.warn('rank 9 is much\n  too large', stacklevel=1) or 0)
  with warnings.catch_warnings():
    warnings.simplefilter('default')
    assert cli.main(['adapters']) == 0
  assert capsys.readouterr().err == 'peftlab: warning: rank 9 is much too large\n'

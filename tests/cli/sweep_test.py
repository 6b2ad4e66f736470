"""`peftlab sweep`: what it starts, what it starts again, what it shows; rows decide."""

import dataclasses
import json

import pytest

from peftlab import cli, testing
from peftlab.sweep import ledger, rows
from peftlab.sweep.engines import engine
from tests.sweep import tiny_sweep

EXPERIMENT = """
from tests.train import tiny

def get_config():
  return tiny.experiment(steps=2, samples=0, sample_tokens=0, checkpoint_every=0)

def sweep_where():
  for where in {wheres!r}:
    yield {{'where': where}}

def sweep_seed():
  for seed in (0, 1):
    yield {{'seed': seed}}
"""
# What the next processes end with instead of running, in turn.
CODES: list[int] = []
STARTED: list[tuple[str, ...]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here(engine.Engine):
  """Runs every job in this process."""

  def run(self, job):
    STARTED.append(job.argv)
    return CODES.pop(0) if CODES else cli.main(list(job.argv))

  def stop(self):
    return


if 'here' not in engine.engines.names():
  engine.engines.register('here')(Here)


@pytest.fixture(scope='module', autouse=True)
def setting():
  patch = pytest.MonkeyPatch()
  tiny_sweep.use_tiny(patch.setattr)
  with testing.quick_compiles():
    yield
  patch.undo()


@pytest.fixture
def sweep(tmp_path):
  """A function that runs `peftlab sweep` with some flags, and gives its exit code."""
  CODES.clear()
  STARTED.clear()
  file = tmp_path / 'experiment.py'
  file.write_text(EXPERIMENT.format(wheres=[('attn.q',)]))

  def run(*flags, wheres=None):
    if wheres:
      file.write_text(EXPERIMENT.format(wheres=wheres))
    usual = (f'--config={file}', f'--root={tmp_path / "s"}', '--engine=here', '--sweep=where,seed')
    return cli.main(['sweep', *usual, *flags])

  run.root = tmp_path / 's'
  return run


def statuses(root):
  return [rows.status(root / name) for name in ledger.read(root)]


def test_a_dry_run_starts_and_writes_nothing(sweep, capsys):
  assert sweep('--dry_run') == 0
  text = capsys.readouterr().out
  assert '2 trials, 0 of them have their row; 1 jobs' in text
  assert 'peftlab pack --config=' in text
  assert not STARTED
  assert not sweep.root.exists()


def test_a_sweep_runs_once_and_what_is_new_is_added(sweep, capsys):
  assert sweep() == 0
  assert [argv[0] for argv in STARTED] == ['pack']
  assert statuses(sweep.root) == ['ok', 'ok']
  assert sweep() == 0
  assert len(STARTED) == 1
  assert '2 trials: 2 ok' in capsys.readouterr().out
  assert cli.main(['sweep', f'--root={sweep.root}', '--report']) == 0
  assert (sweep.root / 'report' / 'index.html').exists()


def test_what_died_is_started_again_and_a_pack_that_cannot_run_is_split(sweep, capsys):
  CODES.extend([-9, 42, 3])
  assert sweep() == 0
  assert [argv[0] for argv in STARTED] == ['pack', 'pack', 'pack', 'train', 'train']
  text = capsys.readouterr().out
  assert 'ended with -9 (start 1); goes on from what is saved' in text
  assert 'its 2 trials run one by one instead' in text
  found = [json.loads(p.read_text()) for p in sweep.root.glob('t*/row.json')]
  assert [row['packed'] for row in found] == [1, 1]


def test_what_dies_again_and_again_is_missing_in_the_end(sweep, capsys):
  CODES.extend([137] * 20)
  assert sweep('--retries=1', '--pack=off') == 1
  assert len(STARTED) == 4
  assert statuses(sweep.root) == ['missing', 'missing']
  assert '2 trials: 2 missing' in capsys.readouterr().out


def test_a_failed_trial_has_a_row_and_runs_again_only_when_asked(sweep):
  both = [('attn.q',), ('nowhere',)]
  assert sweep('--pack=off', wheres=both) == 1
  assert statuses(sweep.root) == ['ok', 'ok', 'failed', 'failed']
  assert sweep('--pack=off', wheres=both) == 1
  assert len(STARTED) == 4
  assert cli.main(['sweep', f'--root={sweep.root}', '--status']) == 1
  assert sweep('--pack=off', '--retry_failed', wheres=both) == 1
  assert len(STARTED) == 6


@pytest.mark.parametrize(
  ('flags', 'message'),
  (
    (['--sweep=wher'], "No sweep 'wher'; did you mean 'where'?"),
    (['--pack=some'], "--pack is 'some'"),
    (['--engine=loca'], "No engine 'loca'"),
    (['--seeds=0'], 'seeds'),
  ),
)
def test_what_is_wrong_is_said_before_anything_is_written(sweep, capsys, flags, message):
  assert sweep(*flags) == 2
  assert message in capsys.readouterr().err
  assert not sweep.root.exists()


def test_without_a_config_or_a_root_it_says_what_is_missing(capsys, tmp_path):
  assert cli.main(['sweep']) == 2
  assert cli.main(['sweep', '--status']) == 2
  assert cli.main(['sweep', '--status', f'--root={tmp_path}']) == 2
  text = capsys.readouterr().err
  for message in ('--config is missing', '--root is missing', 'holds no sweep'):
    assert message in text

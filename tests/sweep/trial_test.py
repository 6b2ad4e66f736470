"""A trial writes one row, once; a killed sweep goes on and ends with the same bits."""

import random

import pytest

from peftlab import testing
from peftlab.sweep import items, rows, trial
from peftlab.train import session
from tests.sweep import kill_loop, tiny_sweep

SETTINGS = ({'seed': 0}, {'seed': 1})


@pytest.fixture(scope='module', autouse=True)
def setting():
  patch = pytest.MonkeyPatch()
  tiny_sweep.use_tiny(patch.setattr)
  with testing.quick_compiles():
    yield
  patch.undo()


def quiet(line):
  del line


def made(**changes):
  usual = {'train__steps': 10, 'train__checkpoint_every': 2}
  return tiny_sweep.trial(**(usual | changes))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """Trials of `SETTINGS` that nothing disturbed: {id: (folder, trial)}."""
  root = tmp_path_factory.mktemp('whole')
  found = {}
  for change in SETTINGS:
    one = made(**change)
    extra = trial.Extra(second='another' if change['seed'] else '')
    code = trial.train(one.experiment, workdir=root / one.id, extra=extra, say=quiet)
    assert code == 0
    found[one.id] = (root / one.id, one)
  return found


def test_a_row_tells_what_the_trial_came_to(whole):
  for name, (folder, one) in whole.items():
    row = rows.read(folder)
    assert (row['id'], row['status'], row['steps'], row['packed']) == (name, 'ok', 10, 1)
    assert row['config']['seed'] == one.experiment.seed
    assert row['trainable'] > 0
    assert row['bytes']['adapter'] > 0
    assert items.mean(*items.read(folder)) == pytest.approx(row['held_out_after'], rel=1e-6)
  second = row['second']
  assert second['corpus'] == 'another'
  assert second['after'] < second['before']


def test_a_trial_with_a_row_does_not_run_again(whole, monkeypatch):
  def never(*arguments, **options):
    del arguments, options
    raise AssertionError('it ran')

  monkeypatch.setattr(session, 'load_base', never)
  for folder, one in whole.values():
    assert trial.train(one.experiment, workdir=folder, say=quiet) == 0


def test_killed_before_its_row_it_is_not_trained_again(whole, monkeypatch):
  (folder, one), *_ = whole.values()
  before = rows.read(folder)
  rows.set_aside(folder)
  monkeypatch.setattr(session, 'fit', None)
  assert trial.train(one.experiment, workdir=folder, say=quiet) == 0
  after = rows.read(folder)
  assert kill_loop.numbers(after) == kill_loop.numbers(before)


def test_a_mistake_is_a_row_that_says_it(tmp_path, capsys):
  one = made(where=('no_such_layer',))
  assert trial.train(one.experiment, workdir=tmp_path, say=quiet) == 1
  row = rows.read(tmp_path)
  assert row['status'] == 'failed'
  assert row['error'].startswith('ValueError: ')
  assert 'no_such_layer' in row['error']
  assert 'Traceback' in capsys.readouterr().err
  assert trial.train(one.experiment, workdir=tmp_path, say=quiet) == 1


def test_what_its_text_forbids_is_a_row_before_the_base_is_loaded(tmp_path, monkeypatch, capsys):
  def refused(experiment, *, say):
    del experiment, say
    raise ValueError('data.length is 9; the base reads at most 8 tokens.')

  monkeypatch.setattr(session, 'prepare', refused)
  monkeypatch.setattr(session, 'load_base', None)
  assert trial.train(made().experiment, workdir=tmp_path, say=quiet) == 1
  assert rows.read(tmp_path)['error'].endswith('at most 8 tokens.')
  assert 'Traceback' in capsys.readouterr().err


def test_a_diverged_trial_has_a_row_without_a_loss(tmp_path):
  one = made(train__learning_rate=3e38)
  assert trial.train(one.experiment, workdir=tmp_path, say=quiet) == 1
  row = rows.read(tmp_path)
  assert (row['status'], row['held_out_after']) == ('diverged', None)


def test_a_stopped_trial_has_no_row(tmp_path, monkeypatch):
  def stopped(*arguments, **options):
    del arguments, options
    raise KeyboardInterrupt

  monkeypatch.setattr(session, 'fit', stopped)
  with pytest.raises(KeyboardInterrupt):
    trial.train(made().experiment, workdir=tmp_path, say=quiet)
  assert rows.status(tmp_path) == 'missing'


def test_launcher_and_trial_killed_at_random_the_rest_is_done_bitwise(whole, tmp_path):
  root = tmp_path / 'killed'
  kill_loop.write_experiment(root, SETTINGS)
  reference = {name: kill_loop.numbers(rows.read(folder)) for name, (folder, _) in whole.items()}
  more = ('--pack=off', '--seeds=1')
  wait = random.random() * 1.5
  kill_loop.one_round(root, 'both', *more, reference=reference, wait=wait)

"""Rows are whole or absent, a lock is waited for, and what a root was asked for is never lost."""

import json
import multiprocessing
import threading
import time

import pytest

from peftlab.sweep import ledger, rows, status, trials
from tests.train import tiny


def test_a_row_comes_back_and_its_status_is_told(tmp_path):
  assert rows.status(tmp_path) == 'missing'
  rows.write(tmp_path, {'id': 't0', 'status': 'ok', 'steps': 3})
  assert rows.read(tmp_path) == {'version': 1, 'id': 't0', 'status': 'ok', 'steps': 3}
  assert [p.name for p in tmp_path.iterdir()] == ['row.json']
  rows.set_aside(tmp_path)
  assert rows.status(tmp_path) == 'missing'
  assert (tmp_path / 'row.1.json').exists()


@pytest.mark.parametrize('row', ({'status': 'running'}, {}, {'status': 'ok', 'x': float('nan')}))
def test_what_is_no_row_is_refused(tmp_path, row):
  with pytest.raises(ValueError, match=r'status|JSON'):
    rows.write(tmp_path, row)
  assert not list(tmp_path.iterdir())


def test_a_torn_row_is_an_error_that_names_the_file(tmp_path):
  (tmp_path / 'row.json').write_text('{"status": "ok"')
  with pytest.raises(ValueError, match=r'row\.json'):
    rows.read(tmp_path)


def _hold(folder, begun, seconds):
  with rows.locked(folder):
    begun.set()
    time.sleep(seconds)
    rows.write(folder, {'status': 'ok'})


def test_who_comes_second_waits_and_finds_the_row(tmp_path):
  context = multiprocessing.get_context('spawn')  # a fork would hold our open files
  begun = context.Event()
  other = context.Process(target=_hold, args=(str(tmp_path), begun, 0.3))
  other.start()
  assert begun.wait(60)
  assert rows.status(tmp_path) == 'running'
  with rows.locked(tmp_path):
    assert rows.read(tmp_path)['status'] == 'ok'
  other.join()


def test_two_launchers_at_once_lose_no_trial(tmp_path):
  made = trials.expand(tiny.experiment(), [{'seed': i} for i in range(8)])

  def add(trial):
    ledger.add(tmp_path, [trial], {trial.id: ['train']})

  threads = [threading.Thread(target=add, args=(trial,)) for trial in made]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert set(ledger.read(tmp_path)) == {trial.id for trial in made}
  again = ledger.trials(tmp_path, [made[3].id])
  assert again[0].experiment == made[3].experiment
  with pytest.raises(ValueError, match="has no trial 'tx'"):
    ledger.trials(tmp_path, ['tx'])


def test_failed_and_missing_trials_stay_in_the_table(tmp_path):
  made = trials.expand(tiny.experiment(), [{'seed': i} for i in range(3)])
  ledger.add(tmp_path, made, {trial.id: ['train'] for trial in made})
  for trial, row in zip(made, ({'status': 'ok', 'steps': 6}, {'status': 'failed'}), strict=False):
    (tmp_path / trial.id).mkdir()
    rows.write(tmp_path / trial.id, row)
  text = status.table(tmp_path)
  assert [trial.id in text for trial in made] == [True] * 3
  assert text.splitlines()[-1] == '3 trials: 1 ok, 1 failed, 1 missing'
  assert not status.complete(tmp_path)


def test_a_folder_without_a_sweep_says_so(tmp_path):
  with pytest.raises(ValueError, match='holds no sweep'):
    ledger.read(tmp_path)
  (tmp_path / 'sweep.json').write_text(json.dumps({'version': 9, 'trials': {}}))
  with pytest.raises(ValueError, match='version 9'):
    ledger.read(tmp_path)

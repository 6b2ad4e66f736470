"""The record of a run: the last line of a step counts, a torn line is forgotten."""

import json

import pytest

from peftlab.train import metrics


def write(folder, *records):
  log = metrics.MetricsLog(folder, tensorboard=False)
  for kind, step, loss in records:
    log.write(kind, step, loss=loss)
  log.close()


def test_of_one_kind_and_step_the_last_line_counts(tmp_path):
  write(tmp_path, ('train', 1, 3.0), ('train', 2, 2.0), ('eval', 2, 9.0))
  write(tmp_path, ('train', 2, 2.5))
  found = [(r['kind'], r['step'], r['loss']) for r in metrics.read_metrics(tmp_path)]
  assert found == [('train', 1, 3.0), ('train', 2, 2.5), ('eval', 2, 9.0)]


def test_a_torn_last_line_is_skipped_and_cut_off(tmp_path):
  write(tmp_path, ('train', 1, 3.0))
  path = tmp_path / metrics.FILE
  with path.open('a') as file:
    file.write('{"kind": "train", "st')
  assert len(metrics.read_metrics(tmp_path)) == 1
  write(tmp_path, ('train', 2, 2.0))
  assert [r['step'] for r in metrics.read_metrics(tmp_path)] == [1, 2]
  assert all(json.loads(line) for line in path.read_text().splitlines())


def test_any_other_bad_line_is_named(tmp_path):
  (tmp_path / metrics.FILE).write_text('{"kind": "train", "step": 1}\nnonsense\n{"a": 1}\n')
  with pytest.raises(ValueError, match=r"Line 2 of '.*metrics.jsonl' is not valid JSON"):
    metrics.read_metrics(tmp_path)
  (tmp_path / metrics.FILE).write_text('{"a": 1}\n')
  with pytest.raises(ValueError, match=r"Line 1 of '.*metrics.jsonl' is not a record"):
    metrics.read_metrics(tmp_path)


def test_a_number_that_is_not_finite_is_null(tmp_path):
  write(tmp_path, ('train', 1, float('nan')))
  assert metrics.read_metrics(tmp_path)[0]['loss'] is None


def test_tensorboard_files_are_written(tmp_path):
  log = metrics.MetricsLog(tmp_path)
  log.write('train', 1, loss=2.0)
  log.close()
  assert list(tmp_path.glob('events.out.tfevents.*'))

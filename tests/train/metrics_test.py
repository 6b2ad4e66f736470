"""The record of a run: the last line of a step counts, a torn line is forgotten."""

import json
import struct

import pytest
from tensorboardX.proto import event_pb2

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


def test_what_is_made_again_is_cut_off_first(tmp_path):
  write(tmp_path, ('eval', 0, 9.0), *(('train', step, 3.0) for step in (1, 2, 3)), ('eval', 2, 8.0))
  log = metrics.MetricsLog(tmp_path, step=2)
  log.write('train', 3, loss=2.5)
  log.close()
  lines = map(json.loads, (tmp_path / metrics.FILE).read_text().splitlines())
  found = [(r['kind'], r['step'], r['loss']) for r in lines]
  assert found == [
    ('eval', 0, 9.0),
    ('train', 1, 3.0),
    ('train', 2, 3.0),
    ('eval', 2, 8.0),
    ('train', 3, 2.5),
  ]


def events(folder):
  """Of every TensorBoard file, oldest first: records of (length, crc, an Event, crc)."""
  for path in sorted(folder.glob('events.out.tfevents.*')):
    content = path.read_bytes()
    while content:
      (size,) = struct.unpack('<Q', content[:8])
      yield event_pb2.Event.FromString(content[12 : 12 + size])
      content = content[size + 16 :]


def test_tensorboard_is_told_from_which_step_a_run_goes_on(tmp_path):
  # At a SessionLog.START TensorBoard forgets what was said of its step and of later ones:
  # tensorboard/backend/event_processing/event_accumulator.py, _MaybePurgeOrphanedData.
  for step in (0, 2):
    log = metrics.MetricsLog(tmp_path, step=step)
    log.write('train', step + 1, loss=2.0)
    log.close()
  starts = [e.step for e in events(tmp_path) if e.HasField('session_log')]
  assert starts == [3]


def test_a_number_that_is_not_finite_is_not_shown_to_tensorboard(tmp_path):
  log = metrics.MetricsLog(tmp_path)
  log.write('train', 1, loss=float('nan'), grad_norm=float('inf'), tokens=3)
  log.close()
  told = [value.tag for e in events(tmp_path) for value in e.summary.value]
  assert told == ['train/tokens']


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

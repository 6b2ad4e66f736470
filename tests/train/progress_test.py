"""What a person sees: lines where there is no terminal, times and tables in words."""

import pytest

from peftlab.train import progress


@pytest.mark.parametrize(
  ('seconds', 'text'), ((0, '0:00'), (75.2, '1:15'), (3600, '1:00:00'), (8105, '2:15:05'))
)
def test_durations(seconds, text):
  assert progress.duration(seconds) == text


def test_tables_are_aligned():
  assert progress.table([('name', 'n'), ('a', '100')]) == 'name    n\na     100'


def test_lines_tell_step_losses_rate_and_time_left(monkeypatch):
  clock = iter(range(0, 1000, 10))
  monkeypatch.setattr(progress.time, 'monotonic', lambda: next(clock))
  lines = []
  shown = progress.Progress(4, say=lines.append)
  shown._bar = None
  for i in range(4):
    shown.update('ab'[i % 2], loss=3.0 - i, tokens=100)
  assert lines[0].startswith('step 1/4: a loss 3.000, - tokens/s, unknown time left')
  assert lines[-1] == 'step 4/4: a loss 1.000, b loss 0.000, 5 tokens/s, 0:00 left'
  assert shown.tokens_per_second == pytest.approx(5)

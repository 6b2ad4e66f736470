"""A workdir: one process, one config; what is refused leaves no trace."""

import dataclasses

import pytest

from peftlab.plugins.lora import LoRA
from peftlab.train import workdir
from peftlab.train.config import MeshConfig
from tests.train import tiny

ONE = tiny.experiment()
OTHER = dataclasses.replace(ONE, seed=5, adapter=LoRA(rank=2, dropout=0.25, alpha=3.0))


def make_run(folder):
  with workdir.claimed(folder, ONE) as path:
    workdir.write_config(path, ONE)
    (path / 'metrics.jsonl').write_text('{}\n')
    (path / 'mine.txt').write_text('keep')


def test_the_same_config_goes_on(tmp_path):
  make_run(tmp_path / 'w')
  with workdir.claimed(tmp_path / 'w', ONE) as path:
    assert (path / 'metrics.jsonl').exists()


def test_what_does_not_change_the_result_may_be_changed(tmp_path):
  make_run(tmp_path / 'w')
  train = dataclasses.replace(ONE.train, checkpoint_every=1, keep=5, log_every=3, eval_every=2)
  other = dataclasses.replace(ONE, train=train, mesh=MeshConfig(fsdp=8))
  with workdir.claimed(tmp_path / 'w', other) as path:
    assert (path / 'metrics.jsonl').exists()


def test_another_config_is_refused_with_the_fields_that_differ(tmp_path):
  make_run(tmp_path / 'w')
  match = r'differs in seed \(0 there, 5 here\), adapter.alpha \(16.0 there, 3.0 here\); give'
  with pytest.raises(ValueError, match=match), workdir.claimed(tmp_path / 'w', OTHER):
    pass


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
  make_run(tmp_path / 'w')
  with workdir.claimed(tmp_path / 'w', OTHER, overwrite=True) as path:
    assert {f.name for f in path.iterdir()} == {'.lock', 'mine.txt'}


def test_a_run_that_got_nowhere_does_not_hold_its_folder(tmp_path):
  with workdir.claimed(tmp_path, ONE) as path:
    workdir.write_config(path, ONE)
  with workdir.claimed(tmp_path, OTHER):
    pass


def test_a_folder_in_use_is_refused(tmp_path):
  with (
    workdir.claimed(tmp_path, ONE),
    pytest.raises(ValueError, match='in use by another run'),
    workdir.claimed(tmp_path, ONE),
  ):
    pass


def test_a_refused_run_leaves_no_folder(tmp_path):
  with pytest.raises(ValueError, match='no'), workdir.claimed(tmp_path / 'new', ONE):
    raise ValueError('no')
  assert not (tmp_path / 'new').exists()


def test_a_file_is_no_workdir(tmp_path):
  (tmp_path / 'f').write_text('')
  for bad in ('f', 'f/inside'):
    with pytest.raises(ValueError, match='Workdir'), workdir.claimed(tmp_path / bad, ONE):
      pass

"""What does not fit is told before a weight is read."""

import dataclasses
import json

import pytest

from peftlab.models import load
from peftlab.plugins.lora import LoRA
from peftlab.train import config, feasible, fields, session, together

GOOD = config.Experiment(
  base=config.BaseConfig(source='package:glassllm/en'),
  data=config.DataConfig(corpus='text.jsonl', length=16, eval_rows=2),
  train=config.TrainConfig(samples=0, sample_tokens=0),
)
# What is changed -> what is said.
BAD = {
  'pattern': ({'where': ('atn.q',)}, r"where='atn.q' matches no layer; did you mean 'attn.q'"),
  'exclude': ({'exclude': ('.*',)}, 'leaves no layer to adapt'),
  'name': ({'name': 'a/b'}, "The adapter name 'a/b'"),
  'role': ({'train.role_rates': ('c=2',)}, r"train.role_rates is 'c'.* Choices: a, b"),
  'rank': ({'adapter.rank': 10**12}, r'The run needs [\d.]+ GiB of memory \(base [\d.]+ MiB, adap'),
  'length': ({'data.length': 200}, 'data.length is 200; the base reads at most 128'),
  'no file': ({'data.corpus': 'txt.jsonl'}, "No file 'txt.jsonl'; did you mean 'text.jsonl'"),
  'bad row': ({'data.corpus': 'bad.jsonl'}, "Row 61 of 'bad.jsonl' is not valid JSON"),
  'objective': ({'data.objective': 'sft'}, 'sft'),
  'batch': ({'data.batch': 10_000}, 'data.batch is 10000'),
  'devices': ({'mesh.fsdp': 64}, 'needs 64 devices; there are 8'),
  'rows': ({'mesh.fsdp': 8}, 'it must be a multiple of 8'),
  'applier': ({'base.applier': 'scam'}, "did you mean 'scan'"),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
  """Good and bad text in the current folder, and no way to read a weight."""
  rows = [json.dumps({'text': f'there is a bird number {n} on the tree.'}) for n in range(60)]
  (tmp_path / 'text.jsonl').write_text('\n'.join(rows))
  (tmp_path / 'bad.jsonl').write_text('\n'.join([*rows, '{']))
  monkeypatch.chdir(tmp_path)

  def read(*arguments, **options):
    del arguments, options
    raise AssertionError('the weights are read')

  monkeypatch.setattr(load, 'load_model', read)


@pytest.mark.parametrize('name', BAD)
def test_what_does_not_fit_is_told_before_a_weight_is_read(name, tmp_path):
  changes, match = BAD[name]
  bad = fields.replace(GOOD, changes)
  with pytest.raises(ValueError, match=match):
    session.train(bad, workdir='run', say=lambda line: None)
  other = dataclasses.replace(GOOD, mesh=bad.mesh, base=bad.base, name='other')
  with pytest.raises(ValueError, match=match):
    together.train([other, bad], workdir='runs', say=lambda line: None)
  assert {f.name for f in tmp_path.iterdir()} <= {'text.jsonl', 'bad.jsonl', 'runs'}


def test_what_fits_goes_on_to_the_weights():
  with pytest.raises(AssertionError, match='the weights are read'):
    session.train(GOOD, workdir='run', say=lambda line: None)


def test_memory_is_counted_by_arithmetic():
  # LoRA on one kernel [128, 128] of each of the 4 layers, rank 3: 4 (3 x 128 + 128 x 3) float32
  # and a scale for each layer; Adam has two moments of each trainable number, and one count.
  experiment = dataclasses.replace(GOOD, adapter=LoRA(rank=3), where=('attn.q',))
  shapes = load.outline(experiment.base.source)
  model, _ = feasible._attach.attach(shapes, experiment.adapter, where='attn.q')
  options = feasible.StepOptions.of(experiment.train)
  found = feasible.sizes(feasible._parts.split(model), options)
  layers = shapes.config.layers
  trained = layers * 2 * 3 * 128 * 4
  assert found['gradient'] == trained
  assert found['adapter'] == trained + layers * 4
  assert found['optimizer'] == 2 * trained + 4
  with pytest.raises(
    ValueError, match=r'needs 5.0 KiB of memory \(a 2.0 KiB, b 3.0 KiB\); there a'
  ):
    feasible.check_memory({'a': 2048, 'b': 3072}, 5119)
  feasible.check_memory({'a': 2048, 'b': 3072}, 5120)


def test_the_memory_of_the_host_is_read():
  found = feasible.host_memory()
  assert found is None or 2**20 < found < 2**50

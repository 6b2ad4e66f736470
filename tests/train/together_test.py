"""Two adapters in turn on one base: shared, compiled once, each best on its own text."""

import dataclasses
import json

import pytest

from peftlab.plugins.lora import LoRA
from peftlab.train import config, together

BASE = config.BaseConfig(source='package:glassllm/en')


def experiment(corpus, **changes):
  made = config.Experiment(
    name=corpus,
    base=BASE,
    adapter=LoRA(rank=4),
    data=config.DataConfig(corpus=corpus, length=32, batch=4, max_rows=60, eval_rows=12),
    train=config.TrainConfig(steps=25, learning_rate=1e-2, checkpoint_every=0, sample_tokens=4),
  )
  return dataclasses.replace(made, **changes)


def test_two_adapters_on_one_base(tmp_path):
  lines = []
  pair = [experiment('chitchat'), experiment('gsm8k')]
  assert together.train(pair, workdir=tmp_path, say=lines.append) == 0
  found = json.loads((tmp_path / 'summary.json').read_text())
  assert found['base_identity'] == '12/12'
  assert found['compiles'] == 1
  adapter = found['runs'][1]['bytes']['adapter']
  assert found['bytes_added_by_second_adapter'] == adapter
  for name in ('chitchat', 'gsm8k'):
    column = {row: losses[name] for row, losses in found['cross'].items()}
    assert min(column, key=lambda row: column[row]) == name
    assert (tmp_path / name / 'adapter' / 'adapter_model.safetensors').exists()
  assert all(run['drop'] > 0.2 for run in found['runs'])
  assert (tmp_path / 'index.html').exists()


@pytest.mark.parametrize(
  ('others', 'told'),
  (
    ([], '1 experiments were given'),
    ([experiment('chitchat')], 'named chitchat, chitchat; each needs its own name'),
    (
      [experiment('gsm8k', base=config.BaseConfig(source='package:glassllm/pt'))],
      'to share a base it must be that of chitchat',
    ),
  ),
)
def test_what_cannot_share_a_base_is_refused(others, told, tmp_path):
  with pytest.raises(ValueError, match=told):
    together.train([experiment('chitchat'), *others], workdir=tmp_path)

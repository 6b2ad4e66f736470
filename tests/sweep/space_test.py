"""Settings, their product, ids that follow from what is computed, command lines that come back."""

import dataclasses
import re

import pytest

from peftlab.cli import _flags
from peftlab.plugins.lora import LoRA
from peftlab.sweep import space, trials
from peftlab.train.config import DataConfig, Experiment

BASE = Experiment(name='a', adapter=LoRA(rank=4))
AXES = {
  'rank': lambda: ({'adapter.rank': r} for r in (2, 4)),
  'lr': lambda: ({'train.learning_rate': r} for r in (1e-3, 1e-2)),
  'other_rank': lambda: [{'adapter.rank': 8}],
  'none': list,
  'bad': lambda: [3],
}


def test_axes_make_a_product_whose_last_changes_fastest():
  found = space.settings(AXES, ['rank', 'lr'])
  assert [space.show(s) for s in found] == [
    'rank=2 learning_rate=0.001',
    'rank=2 learning_rate=0.01',
    'rank=4 learning_rate=0.001',
    'rank=4 learning_rate=0.01',
  ]
  assert space.settings(AXES, []) == [{}]


@pytest.mark.parametrize(
  ('names', 'message'),
  (
    (['rnak'], "No sweep 'rnak'; did you mean 'rank'?"),
    (['rank', 'rank'], "Sweep 'rank' is given twice."),
    (['rank', 'other_rank'], "Sweeps 'rank' and 'other_rank' both set adapter.rank."),
    (['none'], "Sweep 'none' yields no setting."),
    (['bad'], "Sweep 'bad' yields 3"),
  ),
)
def test_what_is_wrong_with_an_axis_is_said(names, message):
  with pytest.raises(ValueError, match=f'^{re.escape(message)}'):
    space.settings(AXES, names)


def test_each_setting_gets_seeds_unless_it_has_one():
  found = space.with_seeds([{'adapter.rank': 2}, {'seed': 7}], first=5, count=2)
  assert found == [{'adapter.rank': 2, 'seed': 5}, {'adapter.rank': 2, 'seed': 6}, {'seed': 7}]


def test_methods_are_compared_at_several_learning_rates():
  found = list(space.methods(['lora'], rates=(1e-3, 1e-2), also={'adapter.rank': 2}))
  assert found == [
    {'adapter': 'lora', 'adapter.rank': 2, 'train.learning_rate': 1e-3},
    {'adapter': 'lora', 'adapter.rank': 2, 'train.learning_rate': 1e-2},
  ]


def test_an_id_says_what_is_computed_and_nothing_else():
  same = (
    BASE,
    dataclasses.replace(BASE, name='b'),
    space.resolve(BASE, {'adapter.rank': 4}),  # given, where it was defaulted
    space.resolve(BASE, {'mesh.data': -1, 'train.log_every': 9, 'base.remat': 'none'}),
    space.resolve(BASE, {'adapter.alpha': 16}),  # an int where a float is meant
  )
  ids = {trials.trial_id(e) for e in same}
  assert len(ids) == 1
  (name,) = ids
  assert name[0] == 't'
  assert len(bytes.fromhex(name[1:])) == 6
  others = [{'seed': 1}, {'adapter.rank': 8}, {'data.corpus': 'gsm8k'}, {'adapter': 'qwix_lora'}]
  assert not ids & {trials.trial_id(space.resolve(BASE, other)) for other in others}


@pytest.mark.parametrize(
  'setting', ({'train.learning_rate': float('nan')}, {'where': {'q'}}, {'adapter': LoRA()})
)
def test_a_value_that_no_id_can_be_made_of_is_refused(setting):
  with pytest.raises(ValueError, match=next(iter(setting))):
    trials.expand(BASE, [setting])


def test_two_settings_of_one_trial_are_refused():
  with pytest.raises(ValueError, match='come to one trial'):
    trials.expand(BASE, [{'mesh.data': 1}, {'mesh.data': -1}])


@pytest.mark.parametrize(
  'setting',
  (
    {'adapter.rank': 2, 'train.learning_rate': 3e-4, 'adapter.rslora': True},
    {'where': ('attn.q', 'mlp'), 'data.corpus': 'a b.txt', 'seed': 3},
    {'train.role_rates': ('b=16',), 'data.shuffle': False},
  ),
)
def test_a_command_line_makes_the_very_trial(setting, monkeypatch):
  from peftlab.cli import _experiments

  monkeypatch.setattr(_experiments, 'load', lambda source: BASE)
  (trial,) = trials.expand(BASE, [setting])
  argv = trials.command(trial, source='x', base=BASE, root='runs/s')
  assert argv[0] == 'train'
  assert argv[-2:] == [f'--workdir=runs/s/{trial.id}', '--trial']
  again, _ = _flags.parse(argv[1:-2], lambda values: None)
  assert again == trial.experiment
  assert trials.trial_id(again) == trial.id


def test_the_data_of_an_experiment_is_in_its_id():
  changed = dataclasses.replace(BASE, data=DataConfig(length=64))
  assert trials.trial_id(changed) != trials.trial_id(BASE)

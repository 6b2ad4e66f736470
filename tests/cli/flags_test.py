"""Flags of an experiment: every leaf is one, in any order, and an error says what was meant."""

import dataclasses
import json

import pytest

from peftlab.cli import _flags
from peftlab.experiments import glassllm_lora
from peftlab.train import fields
from peftlab.train.config import Experiment

NAME = '--config=glassllm_lora'


def parse(*argv):
  return _flags.parse(argv, lambda values: None)[0]


def test_every_leaf_is_a_flag_of_the_same_dotted_name():
  config = parse(NAME)
  for leaf in fields.leaves(config):
    value = ','.join(leaf.value) if isinstance(leaf.value, tuple) else leaf.value
    assert fields.to_dict(parse(NAME, f'--config.{leaf.name}={value}')) == fields.to_dict(config)


@pytest.mark.parametrize(
  ('flag', 'name', 'value'),
  (
    ('--config.seed=3', 'seed', 3),
    ('--config.train.learning_rate=1e-4', 'train.learning_rate', 1e-4),
    ('--config.train.learning_rate=1', 'train.learning_rate', 1.0),
    ('--config.data.shuffle=false', 'data.shuffle', False),
    ('--noconfig.data.shuffle', 'data.shuffle', False),
    ('--config.adapter.rslora', 'adapter.rslora', True),
    ('--config.where=attn.q,attn.v', 'where', ('attn.q', 'attn.v')),
    ('--config.where=.*attn[.]q', 'where', ('.*attn[.]q',)),
    ("--config.where=('q{1,2}', 'v')", 'where', ('q{1,2}', 'v')),
    ('--config.where=[qv]', 'where', ('[qv]',)),
    ('--config.exclude=', 'exclude', ()),
    ('--config.data.corpus=a b.txt', 'data.corpus', 'a b.txt'),
    ('--config.name=1', 'name', '1'),
  ),
)
def test_values_have_the_types_of_their_fields(flag, name, value):
  found = {leaf.name: leaf.value for leaf in fields.leaves(parse(NAME, flag))}
  assert found[name] == value
  assert type(found[name]) is type(value)


def test_a_value_may_stand_apart_and_a_list_be_repeated():
  config = parse(
    '--config',
    'glassllm_lora',
    '--config.seed',
    '4',
    '--config.where',
    'attn.q',
    '--config.where=attn.k',
  )
  assert (config.seed, config.where) == (4, ('attn.q', 'attn.k'))


def test_the_order_of_flags_does_not_matter():
  flags = [NAME, '--config.adapter=qwix_lora', '--config.adapter.rank=2', '--config.seed=1']
  assert parse(*flags) == parse(*reversed(flags))


def test_an_adapter_type_comes_with_its_own_defaults():
  assert type(parse(NAME, '--config.adapter=qwix_lora').adapter).__name__ == 'QwixLoRA'
  assert parse(NAME, '--config.adapter=lora').adapter.rank == 8


def test_brackets_that_do_not_match_are_refused():
  with pytest.raises(ValueError, match=r"has 'mlp=dora\(rank=16', whose brackets do not match"):
    parse(NAME, '--config.adapters=mlp=dora(rank=16')


def test_layers_get_adapters_and_fields_by_pattern():
  config = parse(
    NAME,
    '--config.adapters=attn=lora(rank=2, alpha=4),mlp.down=dora(rank=3,rslora=true)',
    '--config.adapters=.*head=trainable_tokens(tokens=(3,5))',
    '--config.patterns=attn.q:rank=4,mlp.up|mlp.gate:alpha=8',
  )
  adapters = config.spread()
  assert list(adapters) == ['attn', 'mlp.down', '.*head', 'all-linear']
  assert [type(a).__name__ for a in adapters.values()] == [
    'LoRA',
    'DoRA',
    'TrainableTokens',
    'LoRA',
  ]
  assert (adapters['attn'].rank, adapters['attn'].alpha) == (2, 4.0)
  assert (adapters['mlp.down'].rank, adapters['mlp.down'].rslora) == (3, True)
  assert adapters['.*head'].tokens == (3, 5)
  assert adapters['all-linear'] == config.adapter
  assert config.targets['where'] is None
  assert config.targets['fields'] == {
    'rank': {'attn.q': 4},
    'alpha': {'mlp.up|mlp.gate': 8.0},
  }
  assert fields.from_json(Experiment, fields.to_json(config)) == config


def test_without_patterns_one_adapter_goes_where_it_is_told():
  config = parse(NAME, '--config.where=attn.q')
  assert config.spread() is config.adapter
  assert (config.targets['where'], config.targets['fields']) == (('attn.q',), {})


def test_a_file_and_a_name_give_the_same():
  assert parse(f'--config={glassllm_lora.__file__}') == parse(NAME)


def test_what_follows_a_colon_is_given_to_get_config():
  assert parse('--config=demo:gsm8k').data.corpus == 'gsm8k'


def test_json_both_ways():
  config = parse(NAME, '--config.train.role_rates=b=16', '--config.adapter.alpha=3')
  for text in (fields.to_json(config), fields.canonical(config)):
    back = fields.from_json(Experiment, text)
    assert fields.to_dict(back) == fields.to_dict(config)
  assert json.loads(fields.canonical(config))['adapter']['type'] == 'lora'


def test_canonical_json_is_one_for_given_and_defaulted_values():
  assert fields.canonical(Experiment()) == fields.canonical(Experiment(seed=0))
  changed = dataclasses.replace(Experiment(), seed=1)
  assert fields.canonical(changed) != fields.canonical(Experiment())

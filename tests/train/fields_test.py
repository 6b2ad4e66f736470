"""Fields: docs, dotted names, types, JSON; every error names the field."""

import dataclasses

import pytest

from peftlab.train import fields
from peftlab.train.config import DataConfig, Experiment, TrainConfig


@dataclasses.dataclass(frozen=True)
class Inner:
  """An inner one.

  Attributes:
    x, y: two numbers,
      told together.
    words: some words.
  """

  x: int = 1
  y: float | None = None
  words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer:
  """An outer one.

  Attributes:
    inner: an inner one.
    on: whether.
  """

  inner: Inner = Inner()
  on: bool = True


def test_docs_come_from_the_docstring():
  assert fields.docs(Inner) == {
    'x': 'two numbers, told together.',
    'y': 'two numbers, told together.',
    'words': 'some words.',
  }


def test_every_field_of_an_experiment_has_a_doc():
  assert [leaf.name for leaf in fields.leaves(Experiment()) if not leaf.doc] == []


def test_leaves_are_dotted_and_in_order():
  names = [leaf.name for leaf in fields.leaves(Outer())]
  assert names == ['inner.x', 'inner.y', 'inner.words', 'on']


def test_replace_sets_all_at_once():
  # 4 does not divide the default batch of 2: one after the other would fail.
  changed = fields.replace(Experiment(), {'train.accumulate': 4, 'data.batch': 8})
  assert (changed.train.accumulate, changed.data.batch) == (4, 8)


def test_replace_names_an_unknown_field():
  with pytest.raises(
    ValueError, match=r"No field 'inner.z'; did you mean 'inner.[xy]'\? Fields of"
  ):
    fields.replace(Outer(), {'inner.z': 1})


@pytest.mark.parametrize(
  ('value', 'kind', 'expected'),
  (
    (1, float, 1.0),
    ([1, 2], tuple[float, ...], (1.0, 2.0)),
    (None, int | None, None),
    (3, int | None, 3),
    ('a', str, 'a'),
  ),
)
def test_convert(value, kind, expected):
  found = fields.convert('f', value, kind)
  assert found == expected
  assert type(found) is type(expected)


@pytest.mark.parametrize(
  ('value', 'kind', 'told'),
  (
    ('1', int, r"f is '1' \(str\); expected int\."),
    (True, int, r'f is True \(bool\); expected int\.'),
    (1, bool, r'f is 1 \(int\); expected bool\.'),
    (1.0, int, r'f is 1.0 \(float\); expected int\.'),
    (None, int, r'f is None \(NoneType\); expected int\.'),
    ('ab', tuple[str, ...], r"f is 'ab' \(str\); expected str, \.\.\.\."),
    ([1], tuple[str, ...], r'f is 1 \(int\); expected str\.'),
    (float('inf'), float, r'f is inf; expected a finite number\.'),
    ({}, dict, r'f has the type dict, which no flag can hold\.'),
  ),
)
def test_convert_names_what_was_expected(value, kind, told):
  with pytest.raises(ValueError, match=told):
    fields.convert('f', value, kind)


@pytest.mark.parametrize(
  ('text', 'told'),
  (
    ('{', r'The config is not JSON'),
    ('[]', r'The config is \[\]; expected an object'),
    ('{"sed": 1}', r"has no field 'sed'; did you mean 'seed'\?"),
    ('{"train": {"step": 1}}', r"The config: train has no field 'step'; did you mean 'steps'\?"),
    ('{"train": {"steps": "1"}}', r"The config: train.steps is '1' \(str\); expected int\."),
    ('{"adapter": {"rank": 1}}', r"adapter is .*; expected an object with a field 'type'\."),
    ('{"adapter": {"type": "lroa"}}', r"No adapter 'lroa'; did you mean 'lora'\?"),
    ('{"adapter": {"type": "lora", "rnk": 1}}', r"adapter has no field 'rnk'; did you mean 'rank'"),
  ),
)
def test_strict_json(text, told):
  with pytest.raises(ValueError, match=told):
    fields.from_json(Experiment, text)


def test_differences_name_the_leaves():
  one = fields.to_dict(Experiment())
  other = fields.to_dict(
    Experiment(data=DataConfig(batch=4), train=TrainConfig(role_rates=['b=2']), where='attn.q')
  )
  assert fields.differences(one, other) == ['where', 'data.batch', 'train.role_rates']
  assert fields.differences(one, one) == []
  assert fields.differences({'a': 1}, {'b': 1}) == ['a', 'b']
  assert fields.differences({'a': 1}, {'a': 1.0}) == ['a']


def test_one_pattern_is_a_list_of_one():
  assert Experiment(where='attn.q').where == ('attn.q',)

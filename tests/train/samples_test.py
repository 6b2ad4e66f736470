"""Greedy continuations: those of the model called anew for each token."""

import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import _parts
from peftlab.train import evaluate, samples
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


def slowly(model, prompt, tokens):
  ids = list(prompt)
  for _ in range(tokens):
    padded = jnp.asarray([ids + [0] * (16 - len(ids))], jnp.int32)
    ids.append(int(jnp.argmax(model(padded)[0, len(ids) - 1])))
  return ids[len(prompt) :]


def test_prompts_of_different_lengths_are_continued_as_each_alone():
  model = tiny.base_model()
  prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]
  parts = evaluate.evaluation_parts(model)
  found = samples.continuations(parts, prompts, tokens=6, eos_id=-1)
  assert found == [slowly(model, prompt, 6) for prompt in prompts]


def test_a_text_ends_at_its_eos():
  parts = evaluate.evaluation_parts(tiny.base_model())
  whole = samples.continuations(parts, [[3, 1, 4]], tokens=6, eos_id=-1)[0]
  last = len(whole) - 1 - whole[::-1].index(whole[3])
  first = whole.index(whole[3])
  assert samples.continuations(parts, [[3, 1, 4]], tokens=6, eos_id=whole[3])[0] == whole[:first]
  assert last >= first


def test_the_model_is_left_as_it_was():
  model = tiny.base_model()
  before = _parts.split(model)
  samples.continuations(evaluate.evaluation_parts(model), [[1]], tokens=2, eos_id=0)
  after = _parts.split(model)
  assert after.graph == before.graph
  np.testing.assert_array_equal(after.base['embed']['table'], before.base['embed']['table'])

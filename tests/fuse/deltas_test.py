"""Weighted merges of deltas: worked by hand, against goldens, and over seeds."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab.fuse import deltas

FOLDER = pathlib.Path(__file__).parent.parent / 'goldens' / 'peft_zoo' / 'weighted_merge'
BY_HAND = json.loads((FOLDER / 'ties_by_hand.json').read_text())
THREE = [jnp.asarray(d, jnp.float32) for d in BY_HAND['deltas']]


def test_trimming_keeps_the_largest_as_worked_by_hand():
  found = [deltas.trimmed(d, 0.5).tolist() for d in THREE]
  np.testing.assert_array_equal(found, BY_HAND['trimmed'])


@pytest.mark.parametrize(
  ('weights', 'vote', 'expected'),
  (
    ((1.0, 1.0, 1.0), 'sum', [3, 5, 0, -4.5, 2, 0]),
    ((1.0, 1.0, 1.0), 'weighted', [3, 5, 0, -4.5, 2, 0]),
    ((1.0, 0.5, 2.0), 'sum', [2.5, 2.5, 0, -4.5, 4, 0]),
    ((1.0, 0.5, 2.0), 'weighted', [2.5, -3, 0, -4.5, 4, 0]),
    ((1.0, 1.0, 1.0), 'count', [3, 5, 0, -4.5, 2, 0]),  # entry 1 has one of each sign
  ),
)
def test_ties_as_worked_by_hand(weights, vote, expected):
  np.testing.assert_allclose(deltas.ties(THREE, weights, 0.5, vote), expected, rtol=1e-6)


def test_a_weight_of_minus_one_turns_a_vote_only_where_votes_are_weighted():
  two = [jnp.asarray([3.0, 1.0]), jnp.asarray([1.0, 3.0])]
  np.testing.assert_allclose(deltas.agreed(two, (1.0, -1.0), 'sum'), [1.0, -1.0])
  np.testing.assert_allclose(deltas.agreed(two, (1.0, -1.0), 'weighted'), [3.0, -3.0])


def test_density_1_prunes_nothing():
  delta = jax.random.normal(jax.random.key(0), (5, 7))
  assert deltas.trimmed(delta, 1.0) is delta
  assert deltas.dropped(delta, 1.0, jax.random.key(1)) is delta


def test_the_mean_of_dare_over_seeds_is_the_delta():
  delta = jax.random.normal(jax.random.key(0), (8, 12))
  keys = jax.random.split(jax.random.key(1), 4000)
  drawn = jax.vmap(lambda key: deltas.dropped(delta, 0.5, key))(keys)
  assert set(np.unique(np.asarray(drawn == 0))) == {False, True}
  # One draw has the deviation |delta|; the mean of 4000 has |delta| / 63.
  assert float(jnp.max(jnp.abs(drawn.mean(0) - delta) / jnp.abs(delta))) < 0.08


def test_dare_drops_other_entries_of_each_adapter():
  ones = [jnp.ones((40,)), jnp.ones((40,))]
  merged = deltas.dare(ones, (1.0, 1.0), 0.5, 'sum', jax.random.key(0))
  assert set(np.asarray(merged).tolist()) == {0.0, 2.0, 4.0}


def test_dare_equals_the_golden_for_its_masks():
  held = np.load(FOLDER / 'merges.npz')
  parts = [
    deltas.masked(jnp.asarray(held[f'plain/{n}/delta'], jnp.float32), held[f'mask_{n}'] > 0, 0.5)
    for n in 'ab'
  ]
  found = deltas.linear(parts, (0.7, -0.3))
  np.testing.assert_allclose(found, held['plain/dare_linear/expected'], rtol=1e-5, atol=1e-6)

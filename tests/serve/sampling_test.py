"""Tokens are drawn as temperature, top k and top p say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab.serve import Sampling, sampling

PROBABILITIES = np.array([0.05, 0.5, 0.15, 0.3], np.float32)
DRAWS = 4000


def draw(**options) -> np.ndarray:
  """The share of each token among many draws from PROBABILITIES."""
  how = Sampling(**options)
  logits = jnp.tile(jnp.log(PROBABILITIES)[None, :] + 3.0, (DRAWS, 1))
  keys = jax.random.split(jax.random.key(0), DRAWS)
  tokens = sampling.choose(logits, keys, kind=how.kind, numbers=how.numbers())
  return np.bincount(np.asarray(tokens), minlength=4) / DRAWS


@pytest.mark.parametrize(
  ('options', 'expected'),
  (
    ({'temperature': 1.0}, PROBABILITIES),
    ({'temperature': 1.0, 'top_k': 4}, PROBABILITIES),
    ({'temperature': 0.5}, PROBABILITIES**2 / np.sum(PROBABILITIES**2)),
    ({'temperature': 1.0, 'top_k': 2}, [0, 5 / 8, 0, 3 / 8]),
    ({'temperature': 1.0, 'top_k': 99}, PROBABILITIES),
    ({'temperature': 1.0, 'top_p': 0.79}, [0, 5 / 8, 0, 3 / 8]),
    ({'temperature': 1.0, 'top_p': 0.81}, [0, 50 / 95, 15 / 95, 30 / 95]),
    # Of the two that top_k leaves, the first has 5/8.
    ({'temperature': 1.0, 'top_k': 2, 'top_p': 0.6}, [0, 1, 0, 0]),
    ({'temperature': 0.0}, [0, 1, 0, 0]),
    ({'temperature': 0.01}, [0, 1, 0, 0]),
    ({'temperature': 1.0, 'top_k': 1}, [0, 1, 0, 0]),
    ({'temperature': 1.0, 'top_p': 1e-30}, [0, 1, 0, 0]),
  ),
)
def test_shares_are_the_probabilities(options, expected):
  # 4 standard deviations of a share.
  np.testing.assert_allclose(draw(**options), expected, atol=4 * 0.5 / DRAWS**0.5)


def test_of_equal_tokens_the_first_is_taken():
  how = Sampling(temperature=1.0, top_k=1)
  keys = jax.random.split(jax.random.key(0), 1)
  token = sampling.choose(jnp.zeros((1, 5)), keys, kind=how.kind, numbers=how.numbers())
  assert token.tolist() == [0]


@pytest.mark.parametrize(
  ('options', 'said'),
  (
    ({'temperature': -1.0}, 'temperature is -1.0; it must be 0'),
    ({'temperature': 1e-9}, 'temperature is 1e-09; it must be 0'),
    ({'temperature': float('nan')}, 'temperature is nan'),
    ({'temperature': float('inf')}, 'temperature is inf'),
    ({'temperature': 1.0, 'top_k': -1}, 'top_k is -1; it must be at least 1'),
    ({'temperature': 1.0, 'top_p': 0.0}, 'top_p is 0.0; it must be above 0'),
    ({'temperature': 1.0, 'top_p': 1.5}, 'top_p is 1.5; it must be above 0 and at most 1'),
    ({'temperature': 1.0, 'top_p': float('nan')}, 'top_p is nan'),
    ({'top_k': 3}, 'top_k needs a temperature above 0'),
    ({'temperature': '1'}, "temperature is '1'; expected a number"),
    ({'temperature': 1.0, 'top_k': 2.5}, 'top_k is 2.5; expected a number'),
    ({'temperature': 1.0, 'top_p': None}, 'top_p is None; expected a number'),
    ({'top_p': 0.5}, 'top_p needs a temperature above 0'),
  ),
)
def test_refuses(options, said):
  with pytest.raises(ValueError, match=said):
    Sampling(**options)

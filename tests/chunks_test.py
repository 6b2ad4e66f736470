"""Lengths in parts: as few as fit, equal, whole when joined; over how many devices they lie."""

import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import _chunks, _specs

COUNTS = ((8, 8, 1), (8, 4, 2), (8, 3, 3), (7, 6, 2), (6, 0, 6), (1999, 600, 4))


@pytest.mark.parametrize(('length', 'columns', 'parts'), COUNTS)
def test_parts_are_as_few_as_fit(length, columns, parts):
  assert _chunks.count(length, 10, columns * 10) == parts


@pytest.mark.parametrize('parts', (1, 2, 3, 7))
def test_a_length_is_cut_into_equal_parts_and_joined(parts):
  whole = jnp.arange(1.0, 43.0).reshape(2, 7, 3)
  cut = _chunks.cut(whole, parts)
  size = -(-7 // parts)
  assert cut.shape == (parts, 2, size, 3)
  np.testing.assert_array_equal(cut[0], whole[:, :size])
  assert float(cut.sum()) == float(whole.sum())  # behind it are zeros
  np.testing.assert_array_equal(_chunks.joined(cut, 7), whole)


# (mesh, how many devices hold different logits of [8, 1, 64])
SPREAD = (({}, 1), ({'fsdp': 8}, 8), ({'fsdp': 4, 'tensor': 2}, 8), ({'stage': 4, 'data': 2}, 2))


@pytest.mark.parametrize(('axes', 'expected'), SPREAD)
def test_the_limit_is_one_of_a_device(axes, expected):
  mesh = _specs.make_mesh(axes) if axes else None
  with _specs.using(mesh):
    assert _chunks.pieces((8, 1, 64), ('batch', 'length', 'vocab')) == expected

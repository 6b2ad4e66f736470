"""The cache of attention."""

import jax.numpy as jnp
import numpy as np

from peftlab.models import attention


def test_a_negative_position_is_not_written_into_a_cache():
  cache = attention.empty_cache((), (2, 3, 4), dtype=jnp.float32, axes=('batch', 'length', 'x'))
  new = jnp.ones((2, 2, 4))
  attention.extend(cache, new, jnp.asarray([[0, -1], [2, 1]]), axes=('batch', 'length', 'x'))
  np.testing.assert_array_equal(cache[...][..., 0], [[1, 0, 0], [0, 1, 1]])

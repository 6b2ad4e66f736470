"""The fingerprint of a base: of its content, not of its placement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import _specs
from peftlab.train.fingerprint import SAMPLE, fingerprint


def base():
  return {
    'embed': jax.random.normal(jax.random.key(0), (64, 48)),
    'norm': {'scale': jnp.ones((48,), jnp.bfloat16)},
    'codes': jnp.arange(96, dtype=jnp.int32).reshape(8, 12).astype(jnp.int4),
    'step': jnp.asarray(3),
    'flags': jnp.asarray([True, False]),
    'empty': jnp.zeros((0, 3)),
  }


def test_placement_does_not_matter():
  mesh = _specs.make_mesh({'fsdp': 4, 'tensor': 2})
  placed = base()
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp', 'tensor'))
  placed['embed'] = jax.device_put(placed['embed'], sharding)
  assert fingerprint(placed) == fingerprint(base())


@pytest.mark.parametrize('name', ('embed', 'codes'))
def test_any_single_number_matters(name):
  values = base()
  rng = np.random.default_rng(0)
  shape = values[name].shape
  for _ in range(3):
    at = tuple(rng.integers(0, shape))
    one = jnp.asarray(1, values[name].dtype)
    changed = base() | {name: values[name].at[at].add(one)}
    assert fingerprint(changed) != fingerprint(base()), at


def test_two_numbers_that_change_places_matter():
  embed = np.array(base()['embed'])
  assert embed.size > SAMPLE
  a, b = (3, 5), (40, 41)
  embed[a], embed[b] = embed[b], embed[a]
  assert fingerprint(base() | {'embed': jnp.asarray(embed)}) != fingerprint(base())


def test_names_shapes_and_dtypes_matter():
  values = base()
  found = {
    fingerprint(values),
    fingerprint({('x' + k): v for k, v in values.items()}),
    fingerprint(values | {'embed': values['embed'].reshape(48, 64)}),
    fingerprint(values | {'norm': {'scale': jnp.ones((48,), jnp.float16)}}),
  }
  assert len(found) == 4

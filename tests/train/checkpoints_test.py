"""Checkpoints: bitwise back, complete or not there, refused by name where they do not fit."""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from peftlab import _specs
from peftlab.train.checkpoints import Checkpoints, named_arrays

CONFIG = {'name': 'x', 'train': {'steps': 6, 'learning_rate': 0.1}}
POSITION = {'step': 3, 'seed': 0}


def tree(seed=0):
  key = jax.random.key(seed)
  return {
    'adapter': {'layers': {0: {'a': jax.random.normal(key, (3, 8, 2)), 'scale': jnp.ones((3,))}}},
    'opt_state': (
      jnp.asarray(4, jnp.int32),
      jax.random.key(seed + 7),
      jnp.zeros((2,), jnp.bfloat16),
    ),
  }


def opened(folder, config=CONFIG, base='b1'):
  return Checkpoints(folder, config=config, base=base, keep=2)


def saved(folder, *steps):
  store = opened(folder)
  for step in steps:
    store.save(step, tree(step), position=POSITION)
  store.close()


def data(found):
  return {name: np.array(array) for name, array in named_arrays(found).items()}


def test_a_checkpoint_comes_back_bitwise(tmp_path):
  saved(tmp_path, 3)
  found, about = opened(tmp_path).restore(tree(0))
  chex.assert_trees_all_equal(data(found), data(tree(3)))
  assert about['position'] == POSITION
  assert about['step'] == 3
  assert jnp.issubdtype(found['opt_state'][1].dtype, jax.dtypes.prng_key)


def test_a_checkpoint_is_placed_like_the_tree_that_asks_for_it(tmp_path):
  saved(tmp_path, 3)
  mesh = _specs.make_mesh({'fsdp': 8})
  like = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, PartitionSpec())), tree(0))
  where = NamedSharding(mesh, PartitionSpec(None, 'fsdp'))
  like['adapter']['layers'][0]['a'] = jax.device_put(like['adapter']['layers'][0]['a'], where)
  found, _ = opened(tmp_path).restore(like)
  chex.assert_trees_all_equal(data(found), data(tree(3)))
  assert found['adapter']['layers'][0]['a'].sharding == where


def test_the_newest_are_kept(tmp_path):
  saved(tmp_path, 1, 2, 3)
  assert opened(tmp_path).steps() == [2, 3]


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
  @functools.partial(jax.jit, donate_argnums=0)
  def overwrite(arrays):
    return jax.tree.map(lambda a: a * 0 - 1, arrays)

  store, held = opened(tmp_path), {'a': jnp.arange(200_000.0), 'b': jnp.ones((300, 300))}
  expected = {name: np.array(array) for name, array in held.items()}
  store.save(5, held, position=POSITION)
  for _ in range(5):
    held = overwrite(held)
  store.close()
  chex.assert_trees_all_equal(data(opened(tmp_path).restore(held)[0]), expected)


def test_what_an_interrupted_save_left_is_no_checkpoint(tmp_path):
  saved(tmp_path, 2)
  torn = tmp_path / '3.orbax-checkpoint-tmp'
  torn.mkdir()
  (torn / 'arrays').write_text('half')
  assert opened(tmp_path).steps() == [2]


def biggest(folder: pathlib.Path) -> pathlib.Path:
  return max((f for f in folder.rglob('*') if f.is_file()), key=lambda f: f.stat().st_size)


def flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 0xFF
  path.write_bytes(content)


def cut(path):
  path.write_bytes(path.read_bytes()[:-9])


DAMAGES = {
  'flip': ('arrays/d', flip),
  'cut': ('arrays/d', cut),
  'gone': ('arrays/d', pathlib.Path.unlink),
  'about': ('about', flip),
  'no_about': ('about', pathlib.Path.unlink),
  'metadata': ('arrays', pathlib.Path.unlink),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, name):
  saved(tmp_path, 3)
  part, damage = DAMAGES[name]
  damage(biggest(tmp_path / '3' / part))
  with pytest.raises(ValueError, match=rf"Checkpoint '{tmp_path}/3' is damaged: .*\."):
    opened(tmp_path).restore(tree(0))


def test_a_checkpoint_of_another_config_is_refused_with_the_fields_that_differ(tmp_path):
  saved(tmp_path, 3)
  other = {'name': 'x', 'train': {'steps': 6, 'learning_rate': 0.2}}
  match = r'is of another config, which differs in train.learning_rate \(0.1 there, 0.2 here\)'
  with pytest.raises(ValueError, match=match):
    opened(tmp_path, config=other).restore(tree(0))


def test_a_checkpoint_of_another_base_is_refused(tmp_path):
  saved(tmp_path, 3)
  with pytest.raises(ValueError, match=r'trained on another base: its fingerprint is b1, .* b2'):
    opened(tmp_path, base='b2').restore(tree(0))


def test_arrays_of_another_shape_are_refused_by_name(tmp_path):
  saved(tmp_path, 3)
  other = tree(0)
  other['adapter']['layers'][0]['a'] = jnp.zeros((3, 8, 4))
  match = r'holds float32\[3,8,2\] for adapter.layers.0.a; expected float32\[3,8,4\]'
  with pytest.raises(ValueError, match=match):
    opened(tmp_path).restore(other)

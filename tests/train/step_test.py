"""The step: what changes, what does not, and what it costs to change an adapter."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, _specs
from peftlab.models.decoder import Decoder
from peftlab.plugins.lora import LoRA
from peftlab.train import devices, loss, opt_state
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


def numbers(tree):
  return jax.tree.map(np.array, tree)


def test_only_trainable_arrays_of_the_adapter_change_and_all_of_them_do():
  one = tiny.trainee()
  before, base = numbers(one.parts.adapter), numbers(one.parts.base)
  held = one.parts.base
  one.run(*(tiny.batch(i) for i in range(3)))
  after, flags = _parts.flat(one.parts.adapter), _parts.flat(peftlab.trainable(one.parts))
  for path, old in _parts.flat(before).items():
    assert (not np.array_equal(old, after[path])) == flags[path], path
  assert peftlab.assert_base_shared(tiny.base_model(), one.parts).startswith('12/')
  chex.assert_trees_all_equal(base, numbers(held))


def test_optimizer_state_exists_for_trainable_arrays_only():
  one = tiny.trainee()
  trained, frozen = opt_state.partition(one.parts)
  assert jax.tree.leaves(frozen)
  moments = [leaf for leaf in jax.tree.leaves(one.state.inner) if leaf.ndim]
  assert sum(m.size for m in moments) == 2 * sum(leaf.size for leaf in jax.tree.leaves(trained))


def test_partition_and_combine_are_inverse():
  parts = tiny.trainee().parts
  chex.assert_trees_all_equal(opt_state.combine(*opt_state.partition(parts)), parts.adapter)


def test_adamw_moves_each_number_by_the_rate_in_its_first_step():
  # Adam's first update is rate * g / (|g| + eps): Kingma & Ba 2014, algorithm 1.
  one = tiny.trainee(learning_rate=0.01)
  before = opt_state.partition(one.parts)[0]
  before = numbers(before)
  one.run(tiny.batch())
  moved = jax.tree.map(
    lambda a, b: np.abs(np.array(a) - b), opt_state.partition(one.parts)[0], before
  )
  for path, change in _parts.flat(moved).items():
    if path[-1] == 'b':  # a starts with gradient 0, as b starts at 0
      np.testing.assert_allclose(change, 0.01, rtol=1e-3)


@pytest.mark.parametrize('options', ({}, {'clip_norm': 0.1}, {'optimizer': 'sgd'}))
def test_accumulation_of_microbatches_equals_one_batch(options):
  one, two = tiny.trainee(**options), tiny.trainee(accumulate=2, **options)
  batches = [tiny.batch(i) for i in range(2)]
  for a, b in zip(one.run(*batches), two.run(*batches), strict=True):
    chex.assert_trees_all_close(a, b, rtol=1e-5)
  chex.assert_trees_all_close(one.parts.adapter, two.parts.adapter, atol=1e-6)


def test_a_batch_without_a_token_that_counts_has_loss_0_and_gradient_0():
  empty = tiny.batch() | {'loss_mask': jnp.zeros((4, 8))}
  one = tiny.trainee(optimizer='sgd')
  before = numbers(one.parts.adapter)
  [metrics] = one.run(empty)
  assert (metrics['loss'], metrics['grad_norm'], metrics['tokens']) == (0, 0, 0)
  chex.assert_trees_all_equal(before, numbers(one.parts.adapter))


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
  one = tiny.trainee()
  broken = jax.tree.map(lambda a: a, one.parts.base)
  broken['norm']['scale'] = jnp.full_like(broken['norm']['scale'], jnp.nan)
  before, inner = numbers(one.parts.adapter), numbers(one.state.inner)
  adapter, state, metrics = one.step(one.parts.adapter, one.state, broken, tiny.batch())
  assert np.isnan(metrics['loss'])
  assert (int(metrics['skipped']), int(state.skipped), int(state.step)) == (1, 1, 1)
  chex.assert_trees_all_equal(before, numbers(adapter))
  chex.assert_trees_all_equal(inner, numbers(state.inner))


def test_a_spike_is_left_out_and_the_parameters_stay_equal():
  one = tiny.trainee(spike_skip=2.0)
  one.run(tiny.batch())
  before = numbers(one.parts.adapter)
  loud = jax.tree.map(lambda a: a, one.parts.base)
  loud['embed']['table'] = loud['embed']['table'] * 30
  adapter, state, metrics = one.step(one.parts.adapter, one.state, loud, tiny.batch(1))
  assert float(metrics['loss']) > 2 * float(state.average)
  assert int(metrics['skipped']) == 1
  chex.assert_trees_all_equal(before, numbers(adapter))


def test_a_second_adapter_another_rate_and_another_scale_compile_nothing():
  one = tiny.trainee(LoRA(rank=3), name='one', learning_rate=0.1)
  one.run(tiny.batch(), tiny.batch(1))
  two = tiny.trainee(LoRA(rank=3, alpha=2.0), name='two', learning_rate=0.2, weight_decay=0.1)
  two.run(tiny.batch(), tiny.batch(1))
  assert one.step is two.step
  assert one.step.traces == 1
  other = tiny.trainee(LoRA(rank=4))
  assert other.step is not one.step


def test_the_rate_follows_the_schedule():
  one = tiny.trainee(schedule='linear', steps=4, learning_rate=0.1)
  rates = [m['learning_rate'] for m in one.run(*(tiny.batch(i) for i in range(4)))]
  np.testing.assert_allclose(rates, [0.1, 0.075, 0.05, 0.025], rtol=1e-6)


def test_role_rates_scale_the_updates_of_their_slots():
  plain, plus = tiny.trainee(), tiny.trainee(role_rates=('b=16',))
  plain.run(tiny.batch())
  plus.run(tiny.batch())
  for path, array in _parts.flat(plain.parts.adapter).items():
    factor = 16.0 if path[-1] == 'b' else 1.0
    np.testing.assert_allclose(
      np.array(_parts.flat(plus.parts.adapter)[path]), factor * np.array(array), rtol=1e-5
    )


def test_an_unknown_role_is_named():
  with pytest.raises(ValueError, match=r"train.role_rates is 'c'.* Choices: a, b\."):
    tiny.trainee(role_rates=('c=2',)).run(tiny.batch())


def test_dropout_draws_anew_in_each_step_and_is_off_in_evaluation():
  one = tiny.trainee(LoRA(rank=2, dropout=0.5), learning_rate=0.0)
  one.parts = one.parts.replace(adapter=jax.tree.map(lambda a: a + 0.3, one.parts.adapter))
  first, second = one.run(tiny.batch(), tiny.batch())
  assert first['loss'] != second['loss']


def test_an_adapter_without_trainable_arrays_is_an_error():
  parts = _parts.split(tiny.base_model())
  with pytest.raises(ValueError, match='no trainable array'):
    opt_state.init_opt_state(parts, opt_state.StepOptions(), learning_rate=0.1)


@pytest.mark.parametrize('shape', ({'data': 8}, {'fsdp': 4, 'tensor': 2}))
def test_on_a_mesh_losses_are_equal_and_placements_stay(shape):
  alone = tiny.trainee(clip_norm=1.0).run(*(tiny.batch(i, rows=8) for i in range(3)))
  mesh = _specs_mesh(shape)
  model, _ = peftlab._specs.place(tiny.base_model(), mesh)
  one = tiny.trainee(model=model, clip_norm=1.0)
  where = jax.tree.map(lambda a: a.sharding, (one.parts.adapter, one.state))
  with _specs.using(mesh):
    found = one.run(*(devices.place_batch(tiny.batch(i, rows=8), mesh) for i in range(3)))
  for a, b in zip(alone, found, strict=True):
    np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-5)
    np.testing.assert_allclose(a['grad_norm'], b['grad_norm'], rtol=1e-3)
  assert jax.tree.map(lambda a: a.sharding, (one.parts.adapter, one.state)) == where
  assert one.step.traces == 1


def _specs_mesh(shape):
  return peftlab._specs.make_mesh(shape)


def test_the_loss_is_the_mean_over_tokens_that_count():
  one, batch = tiny.trainee(learning_rate=0.0), tiny.batch()
  model: Decoder = tiny.base_model()
  logits = model(batch['tokens'])
  each = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(each, batch['targets'][..., None], axis=-1)[..., 0]
  expected = -jnp.sum(picked * batch['loss_mask']) / jnp.sum(batch['loss_mask'])
  [metrics] = one.run(batch)
  np.testing.assert_allclose(metrics['loss'], float(expected), rtol=1e-5)
  assert metrics['tokens'] == float(loss.count_tokens(batch))


def test_an_update_beyond_all_numbers_is_not_kept_and_its_loss_is_nan():
  one = tiny.trainee(learning_rate=1e38)
  before = numbers(one.parts.adapter)
  found = one.run(tiny.batch())[0]
  assert np.isnan(found['loss'])
  assert np.isfinite(found['grad_norm'])
  assert found['skipped'] == 1
  chex.assert_trees_all_equal(numbers(one.parts.adapter), before)

"""The loss: equal to optax's, whole or in chunks, and 0 where nothing counts."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from peftlab import _parts, _specs
from peftlab.train import loss
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


def test_token_losses_are_those_of_optax():
  logits = jax.random.normal(jax.random.key(0), (3, 5, 11)) * 4
  targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 11)
  expected = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  chex.assert_trees_all_close(loss.token_losses(logits, targets), expected, rtol=1e-5)


@pytest.mark.parametrize('columns', (1, 2, 4, 8))
def test_chunks_give_the_loss_and_the_gradient_of_the_whole(columns):
  batch, parts = tiny.batch(rows=2), tiny.trainee().parts
  rest = parts.replace(adapter={})

  def summed(adapter, most):
    return loss.summed_loss(rest.replace(adapter=adapter), batch, most_logits=most)[0]

  whole = jax.value_and_grad(summed)(parts.adapter, loss.MOST_LOGITS)
  cut = jax.value_and_grad(summed)(parts.adapter, columns * 2 * tiny.VOCAB)
  chex.assert_trees_all_close(whole, cut, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize('tied', (True, False))
def test_the_head_is_gathered_once_and_not_by_every_chunk(tied):
  """FSDP cuts its embed dimension; whole, it goes into the loop over chunks."""
  parts = tiny.trainee().parts
  model = _parts.merge(parts)
  if not tied:
    model.untie()
  parts, batch = _parts.split(model), tiny.batch(rows=4)
  mesh = _specs.make_mesh({'fsdp': 4}, jax.devices()[:4])
  with _specs.using(mesh):
    run = jax.make_jaxpr(lambda p: loss.summed_loss(p, batch, most_logits=tiny.VOCAB)[0])
    outer = run(parts).jaxpr
  shape = (model.embed.table if tied else model.head.kernel).shape
  held = [e for e in outer.eqns if e.primitive.name == 'sharding_constraint']
  (gather,) = (e for e in held if e.outvars[0].aval.shape == shape)
  assert gather.params['sharding'].spec == jax.sharding.PartitionSpec(None, None)
  loops = [e for e in outer.eqns if e.primitive.name == 'scan']
  assert gather.outvars[0] in loops[-1].invars


def test_a_model_without_hidden_is_called_as_a_whole():
  class Table(nnx.Module):
    def __init__(self):
      self.table = nnx.Param(jnp.eye(tiny.VOCAB) * 3)

    def __call__(self, tokens, positions=None, segment_ids=None):
      del positions, segment_ids
      return self.table[...][tokens]

  batch = tiny.batch()
  total, _ = loss.summed_loss(_parts.split(Table()), batch)
  logits = np.eye(tiny.VOCAB)[np.array(batch['tokens'])] * 3
  each = (
    np.log(np.exp(logits).sum(-1))
    - np.take_along_axis(logits, np.array(batch['targets'])[..., None], axis=-1)[..., 0]
  )
  np.testing.assert_allclose(float(total), (each * np.array(batch['loss_mask'])).sum(), rtol=1e-5)


def test_logits_that_are_masked_may_be_anything():
  logits = jnp.full((1, 2, 3), jnp.nan).at[0, 0].set(0.0)
  mask = jnp.asarray([[True, False]])
  found = loss._masked_sum(logits, jnp.zeros((1, 2), jnp.int32), mask)
  np.testing.assert_allclose(float(found), np.log(3), rtol=1e-6)

"""qwix's own provider: equal to LoRA, and its factors made while a stack runs, the base shared."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

import peftlab
from peftlab.appliers import Scan, Sequential
from peftlab.plugins import qwix_lora
from peftlab.plugins.lora import LoRA


class Block(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)

  def __call__(self, x):
    return x + self.down(jnp.tanh(self.up(x)))


def call(layer, x):
  return layer(x)


X = np.random.default_rng(0).standard_normal((2, 5, 8), dtype=np.float32)
RULE = qwix.LoraRule(module_path='.*', rank=2, alpha=4.0)


@pytest.mark.parametrize('axis', (0, 1))
@pytest.mark.parametrize('applier', (Scan, Sequential))
def test_created_factors_share_the_base_and_cost_their_own_bytes(applier, axis):
  layers = peftlab.stack(Block, 3, rngs=0, axis=axis)
  base, applier = peftlab.split(layers), applier(axis=axis)
  made = [
    qwix_lora.create(layers, X, rule=RULE, applier=applier, rngs=nnx.Rngs(seed)) for seed in (1, 2)
  ]
  parts = [peftlab.split(model) for model in made]
  factors = 3 * 4 * (8 * 2 + 2 * 12 + 12 * 2 + 2 * 8)
  for part in parts:
    assert peftlab.assert_base_shared(base, part) == '4/4'
    assert peftlab.nbytes(part.adapter) == factors
  everything = (base, parts)
  assert peftlab.nbytes(everything) == peftlab.nbytes(base) + 2 * factors
  assert parts[0].graph == parts[1].graph


def test_created_factors_differ_per_layer_and_leave_the_output_as_it_was():
  layers = peftlab.stack(Block, 3, rngs=0)
  made = qwix_lora.create(layers, X, rule=RULE, applier=Scan(), rngs=nnx.Rngs(1))
  a = np.asarray(made.up.kernel_lora_a[...])
  assert a.shape == (3, 8, 2)
  assert np.abs(a[0] - a[1]).max() > 0.01
  before, _ = Scan().run(layers, X, call)
  after, _ = Scan().run(made, X, call)
  chex.assert_trees_all_close(after, before)


def test_a_rule_that_matches_nothing_is_an_error():
  layers = peftlab.stack(Block, 3, rngs=0)
  rule = qwix.LoraRule(module_path='nothing', rank=2, alpha=4.0)
  with pytest.raises(ValueError, match='matches no product of a weight'):
    qwix_lora.create(layers, X, rule=rule, applier=Scan(), rngs=nnx.Rngs(1))


def test_the_adapter_type_computes_what_lora_computes():
  layers = peftlab.stack(Block, 3, rngs=0)
  outputs = []
  for adapter in (LoRA(rank=2), qwix_lora.QwixLoRA(rank=2)):
    parts = peftlab.split(peftlab.attach(layers, adapter, rngs=1)[0])
    moved = jax.tree.map(lambda a, t: a + 0.1 * t, parts.adapter, peftlab.trainable(parts))
    outputs.append(Scan().apply(parts.replace(adapter=moved), X, call)[0])
  chex.assert_trees_all_close(*outputs, rtol=1e-5, atol=1e-5)

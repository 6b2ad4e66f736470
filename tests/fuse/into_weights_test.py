"""Merging into weights: equal outputs, one rounding, nothing else touched."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab.fuse import fuse
from peftlab.plugins.lora import LoRA


class Layers(nnx.Module):
  def __init__(self, rngs, dtype=jnp.float32):
    options = {'rngs': rngs, 'param_dtype': dtype}
    self.embed = nnx.Embed(10, 8, **options)
    self.linear = nnx.Linear(8, 6, **options)
    self.general = nnx.LinearGeneral(6, (2, 4), **options)
    self.einsum = nnx.Einsum('bnh,nhd->bd', (2, 4, 5), (5,), **options)
    self.conv = nnx.Conv(5, 3, (3,), **options)

  def __call__(self, tokens):
    x = jnp.tanh(self.linear(self.embed(tokens)))
    return self.conv(self.einsum(self.general(x))[None])


EVERY = ('all-linear', 'embed')


def randomised(model, seed=0):
  parts = peftlab.split(model)
  leaves, tree = jax.tree.flatten(parts.adapter)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  pairs = zip(leaves, keys, strict=True)
  noisy = [a + 0.1 * jax.random.normal(k, a.shape, a.dtype) for a, k in pairs]
  return peftlab.merge(parts.replace(adapter=jax.tree.unflatten(tree, noisy)))


def test_fused_output_equals_adapted_output_for_every_layer_type():
  base, tokens = Layers(nnx.Rngs(0)), jnp.arange(7)
  adapted = randomised(peftlab.attach(base, LoRA(rank=2), where=EVERY)[0])
  with pytest.warns(UserWarning, match='embed is merged as an embedding'):
    fused = fuse(adapted)
  assert np.abs(adapted(tokens) - base(tokens)).max() > 0.1
  chex.assert_trees_all_close(fused(tokens), adapted(tokens), rtol=1e-5, atol=1e-5)
  assert type(fused.linear) is nnx.Linear


def test_fuse_leaves_the_given_model_and_every_other_array_alone():
  base = Layers(nnx.Rngs(0))
  adapted = randomised(peftlab.attach(base, LoRA(rank=2), where='linear')[0])
  before = peftlab.split(adapted)
  fused = fuse(adapted)
  peftlab.assert_base_shared(before, adapted)
  assert fused.general.kernel.get_value() is base.general.kernel.get_value()
  assert fused.linear.bias.get_value() is base.linear.bias.get_value()
  assert fused.linear.kernel.get_value() is not base.linear.kernel.get_value()


def test_fusing_one_of_two_keeps_the_arrays_of_the_other():
  first = peftlab.attach(Layers(nnx.Rngs(0)), LoRA(rank=2), where='linear', name='one')[0]
  both = randomised(peftlab.attach(first, LoRA(rank=3), where='linear', rngs=1, name='two')[0])
  fused = fuse(both, name='one')
  tokens = jnp.arange(7)
  chex.assert_trees_all_close(fused(tokens), both(tokens), rtol=1e-5, atol=1e-5)
  kept = fused.linear.adapters[0]
  assert kept.name == 'two'
  assert kept.a.get_value() is both.linear.adapters[1].a.get_value()


def test_a_bfloat16_kernel_is_computed_in_float32_and_rounded_once():
  base = Layers(nnx.Rngs(0), jnp.bfloat16)
  adapted = randomised(peftlab.attach(base, LoRA(rank=2, alpha=2.0), where='linear')[0])
  one = adapted.linear.adapters[0]
  w, a, b, s = (
    np.asarray(v[...], np.float32) for v in (adapted.linear.kernel, one.a, one.b, one.scale)
  )
  expected = jnp.asarray(w + (a * s) @ b, jnp.bfloat16)
  chex.assert_trees_all_equal(fuse(adapted).linear.kernel.get_value(), expected)


@pytest.mark.parametrize('axis', (0, 1))
def test_a_stack_is_fused_layer_by_layer(axis):
  layers = peftlab.stack(lambda rngs: nnx.Linear(6, 6, rngs=rngs), 3, rngs=0, axis=axis)
  adapted = randomised(peftlab.attach(layers, LoRA(rank=2))[0])
  x = jnp.ones((2, 6))
  run = peftlab.appliers.Sequential(axis=axis).apply
  fused = fuse(adapted)
  outputs = [run(peftlab.split(m), x, lambda layer, x: layer(x))[0] for m in (adapted, fused)]
  chex.assert_trees_all_close(*outputs, rtol=1e-5, atol=1e-5)


def test_a_tied_embedding_is_untied_aloud_and_the_logits_stay():
  base = peftlab.load_model('package:glassllm/en')
  adapted = randomised(peftlab.attach(base, LoRA(rank=2), where='embed')[0])
  tokens = jnp.arange(1, 20)[None]
  with pytest.warns(UserWarning, match='head gets a copy of its own'):
    fused = fuse(adapted)
  assert base.tied
  assert not fused.tied
  chex.assert_trees_all_close(fused(tokens), adapted(tokens), rtol=1e-4, atol=1e-4)


def test_layers_that_share_a_weight_each_get_what_they_computed():
  class Shared(nnx.Module):
    def __init__(self):
      self.a, self.b = (nnx.Linear(6, 6, rngs=nnx.Rngs(i)) for i in range(2))
      self.b.kernel = self.a.kernel

    def __call__(self, x):
      return self.b(jnp.tanh(self.a(x)))

  x = jnp.ones((3, 6))
  for where in ('a', ('a', 'b')):
    adapted = randomised(peftlab.attach(Shared(), LoRA(rank=2), where=where)[0])
    chex.assert_trees_all_close(fuse(adapted)(x), adapted(x), rtol=1e-5, atol=1e-5)


def test_nan_is_refused_by_name_and_nothing_changes():
  adapted = peftlab.attach(Layers(nnx.Rngs(0)), LoRA(rank=2), where='linear')[0]
  adapted.linear.adapters[0].b[...] = jnp.full((2, 6), jnp.nan)
  with pytest.raises(ValueError, match="linear holds NaN or infinity in 'b'"):
    fuse(adapted)


def test_an_unknown_name_is_refused_with_the_nearest():
  adapted = peftlab.attach(Layers(nnx.Rngs(0)), LoRA(rank=2), where='linear', name='chat')[0]
  with pytest.raises(ValueError, match="did you mean 'chat'"):
    fuse(adapted, name='chta')


WRONG = {
  'transposed': (lambda w: w.T, r'Odd.fuse gave shape \(4, 6\) for a kernel of shape \(6, 4\)'),
  'nothing': (lambda w: None, 'Odd.fuse gave NoneType for a kernel'),
}


@pytest.mark.parametrize('case', WRONG)
def test_what_fuse_gives_must_have_the_shape_of_the_kernel(case):
  give, message = WRONG[case]

  class Odd(LoRA):
    def fuse(self, w, p):
      del p
      return give(w)

  model, _ = peftlab.attach(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), Odd(rank=2), where='.*')
  with pytest.raises(ValueError, match=message):
    fuse(model)

"""Any layer as a kernel [in, out]: layouts, custom layers, the frozen matmul's gradients."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _kernel
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases

RNGS = nnx.Rngs(0)

# layer, weight's words, (letters of input, weight, output) for an input of some rank
LAYOUTS = {
  'linear': (nnx.Linear(3, 5, rngs=RNGS), 'in out', 3, ('cda', 'ab', 'cdb')),
  'general, trailing': (
    nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=RNGS),
    'in in out out',
    4,
    ('efab', 'abcd', 'efcd'),
  ),
  'general, leading': (
    nnx.LinearGeneral(3, 5, axis=0, rngs=RNGS),
    'in out',
    3,
    ('acd', 'ab', 'cdb'),
  ),
  'einsum': (
    nnx.Einsum('...hd,hde->...e', (2, 3, 5), rngs=RNGS),
    'in in out',
    4,
    ('ABhd', 'hde', 'ABe'),
  ),
  'einsum, out first': (
    nnx.Einsum('btd,hdk->bthk', (2, 3, 5), rngs=RNGS),
    'out in out',
    3,
    ('btd', 'hdk', 'bthk'),
  ),
  'embed': (nnx.Embed(7, 3, rngs=RNGS), 'in out', 2, None),
  'conv': (nnx.Conv(3, 5, kernel_size=(2, 4), rngs=RNGS), 'tap tap in out', 4, None),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_a_layer_tells_how_it_uses_its_weight(name):
  layer, words, ndim, expected = LAYOUTS[name]
  layout = _kernel.layer_type(layer).layout(layer)
  weight = getattr(layer, _kernel.layer_type(layer).weight)
  assert (' '.join(layout.words), layout.shape) == (words, weight.shape)
  if expected is None:
    assert layout.equation is None
    return
  x, kernel, y = layout.equation(ndim)
  rename = str.maketrans(kernel + x + y, expected[1] + expected[0] + expected[2])
  assert tuple(s.translate(rename) for s in (x, kernel, y)) == expected
  assert [len(set(s)) for s in (x, kernel, y)] == [len(s) for s in (x, kernel, y)]


@pytest.mark.parametrize('name', [n for n, (*_, equation) in LAYOUTS.items() if equation])
def test_the_equation_is_the_layer(name):
  """y of the layer = einsum of its own equation, for inputs of random values."""
  layer, _, ndim, _ = LAYOUTS[name]
  x, kernel, y = _kernel.layer_type(layer).layout(layer).equation(ndim)
  sizes = dict(zip(kernel, layer.kernel.shape, strict=True))
  inputs = jax.random.normal(jax.random.key(0), [sizes.get(c, 2) for c in x])
  expected = np.einsum(f'{x},{kernel}->{y}', inputs, layer.kernel[...])
  np.testing.assert_allclose(layer(inputs), expected, rtol=1e-5, atol=1e-6)


WORDS = (
  'in out',
  'out in',
  'in in out',
  'out in out',
  'in out in out',
  'out out in',
  'tap tap in out',
)


@pytest.mark.parametrize('words', WORDS)
def test_a_weight_is_a_matrix_and_back(words):
  words = tuple(words.split())
  shape = tuple(range(2, 2 + len(words)))
  weight = jnp.arange(np.prod(shape)).reshape(shape)
  matrix = _kernel.as_matrix(weight, words)
  sizes = _kernel.kernel_sizes(words, shape)
  assert matrix.shape == (sizes['in'], sizes['out'])
  np.testing.assert_array_equal(_kernel.from_matrix(matrix, words, shape), weight)


class Transposed(nnx.Module):
  """y = x W^T, its weight called w: a layer that the framework does not know."""

  def __init__(self):
    self.w = nnx.Param(jax.random.normal(jax.random.key(0), (5, 3)))

  def __call__(self, x):
    return x @ self.w[...].T


@pytest.fixture
def own_layers(monkeypatch):
  monkeypatch.setattr(_kernel, '_LAYERS', dict(_kernel._LAYERS))


def test_a_custom_layer_is_registered_in_one_line(own_layers):
  del own_layers
  peftlab.register_layer(Transposed, 'out in', weight='w', bias=None)
  model, report = peftlab.attach(Transposed(), LoRA(rank=2))
  assert report.rows[0].kernel == (3, 5)
  parts = cases.randomized(peftlab.split(model))
  x = jax.random.normal(jax.random.key(1), (2, 4, 3))
  p = parts.adapter['adapters'][0]
  delta = (p['a'] @ p['b']) * p['scale']
  expected = x @ (parts.base['w'].T + delta)
  np.testing.assert_allclose(peftlab.merge(parts)(x), expected, rtol=1e-5, atol=1e-6)


class Odd(nnx.Module):
  """A layer of 4 x 4, so that a wrong layout fits, that can do more than multiply."""

  def __init__(self, kind):
    keys = jax.random.split(jax.random.key(0))
    self.w = nnx.Param(jax.random.normal(keys[0], (4, 4)))
    self.b = nnx.Param(jnp.zeros(4))
    self.kind = kind

  def __call__(self, x):
    y = x @ (self.w[...].T if self.kind == 'transposed' else self.w[...])
    b = self.b[...].reshape((1,) * (x.ndim - 1) + (4,))
    y = y + (2 * b if self.kind == 'bias twice' else b)
    return jnp.tanh(y) if self.kind == 'tanh' else y


# what -> (kind of layer, how it is registered, what it does not do, or None: all is well)
REGISTRATIONS = {
  'right': ('', dict(layout='in out', weight='w', bias='b'), None),
  'right, transposed': ('transposed', dict(layout='out in', weight='w', bias='b'), None),
  'wrong layout': ('', dict(layout='out in', weight='w', bias='b'), 'without its bias'),
  'a bias that is not told': ('', dict(layout='in out', weight='w', bias=None), 'without its bias'),
  'a bias of another name': ('', dict(layout='in out', weight='w'), 'without its bias'),
  'a bias added twice': ('bias twice', dict(layout='in out', weight='w', bias='b'), 'in all'),
  'tanh behind it': ('tanh', dict(layout='in out', weight='w', bias='b'), 'without its bias'),
}


@pytest.mark.parametrize('stacked', (False, True))
@pytest.mark.parametrize('case', REGISTRATIONS)
def test_a_layer_that_is_not_what_its_registration_says_is_refused(case, stacked, own_layers):
  del own_layers
  kind, registration, fault = REGISTRATIONS[case]
  peftlab.register_layer(Odd, **registration)
  model = peftlab.stack(lambda rngs: Odd(kind), 3, rngs=0, axis=1) if stacked else Odd(kind)
  if fault is None:
    assert peftlab.attach(model, LoRA(rank=2))[1].trainable == (3 if stacked else 1) * 2 * (4 + 4)
    return
  with pytest.raises(ValueError, match=f'^Odd of type Odd is registered .* but {fault} it does'):
    peftlab.attach(model, LoRA(rank=2))


def test_a_layer_that_takes_more_than_its_input_says_how_to_register_it(own_layers):
  class Sized(Odd):
    def __call__(self, x, size):
      del size
      return super().__call__(x)

  del own_layers
  peftlab.register_layer(Sized, weight='w', bias='b')
  with pytest.raises(ValueError, match=r'called with \(x, size\).* register it with check=False'):
    peftlab.attach(Sized(''), LoRA(rank=2))
  peftlab.register_layer(Sized, weight='w', bias='b', check=False)
  assert peftlab.attach(Sized(''), LoRA(rank=2))[1].coverage == 1


def test_a_weight_that_a_layer_lacks_is_named(own_layers):
  del own_layers
  peftlab.register_layer(Odd, weight='kernel')
  with pytest.raises(ValueError, match=r"^Odd has no weight 'kernel'; .*Variables: b, w\."):
    peftlab.attach(Odd(''), LoRA(rank=2))


def test_a_subclass_is_adapted_like_its_parent():
  class Named(nnx.Linear):
    pass

  assert _kernel.layer_type(Named(2, 3, rngs=nnx.Rngs(0))) is _kernel.layer_type(
    nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  )


BAD = {
  'no module': ((dict,), 'register_layer takes a subclass of nnx.Module'),
  'an instance': ((Transposed(),), 'register_layer takes a subclass of nnx.Module'),
  'other words': ((Transposed, 'in outt'), "layout 'in outt' of Transposed must be made of"),
  'no out': ((Transposed, 'in in'), 'with at least one of each'),
  'empty': ((Transposed, ''), 'with at least one of each'),
}


@pytest.mark.parametrize('case', BAD)
def test_a_bad_layer_type_is_refused(case, own_layers):
  del own_layers
  arguments, message = BAD[case]
  with pytest.raises(ValueError, match=message):
    peftlab.register_layer(*arguments)
  assert Transposed not in _kernel._LAYERS


def test_the_gradients_of_the_frozen_matmul_are_those_of_a_matmul():
  x = jax.random.normal(jax.random.key(0), (2, 3, 4))
  w = jax.random.normal(jax.random.key(1), (4, 5))

  def loss(dot):
    return lambda x, w: jnp.sum(jnp.sin(dot(x, w)))

  for wrt in (0, 1, (0, 1)):
    got = jax.grad(loss(_kernel.frozen_dot), wrt)(x, w)
    expected = jax.grad(loss(jnp.matmul), wrt)(x, w)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_where_the_kernel_is_frozen_its_input_is_not_kept():
  """What the backward pass keeps is the kernel, the caller's own array, and nothing of x."""
  x, w = jnp.ones((7, 4)), jnp.ones((4, 5))
  _, backward = jax.vjp(lambda x: _kernel.frozen_dot(x, w), x)
  kept = [leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, 'shape')]
  assert x.shape not in [leaf.shape for leaf in kept]
  _, backward = jax.vjp(_kernel.frozen_dot, x, w)
  kept = [leaf.shape for leaf in jax.tree.leaves(backward) if hasattr(leaf, 'shape')]
  assert x.shape in kept, 'the test would not see it'

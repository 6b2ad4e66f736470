"""P-tuning: virtual tokens made by a small network (Liu et al. 2021, arXiv:2103.10385)."""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import peftlab

ENCODERS = ('mlp', 'lstm')
DIRECTIONS = ('forward', 'backward')


@peftlab.register_adapter('p_tuning')
@dataclasses.dataclass(frozen=True, kw_only=True)
class PTuning(peftlab.Adapter):
  """[f(e); x] for the embedded text x, with e [count, d] trained and d the width of x.

  mlp: f(e) = relu(relu(e W1 + b1) W2 + b2) W3 + b3. Trainable: count d + (2 d + h + 2) h + d.
  lstm (eq. 6): f(e) = relu(l W2 + b2) W3 + b3, l [count, 2 h] the outputs of `layers` bidirectional
  LSTMs in a row. Trainable: count d + 2 * 4 h (d + h + 2) + (layers - 1) 2 * 4 h (3 h + 2) + (2 h +
  1) 2 h + (2 h + 1) d.

  Attributes:
    count: virtual tokens.
    hidden: h.
    encoder: mlp, of three layers, or lstm.
    layers: of the LSTM.
  """

  point = 'inputs'
  identity_at_start = False
  mergeable = False
  mixed_batch = False
  small: ClassVar[Mapping[str, Any]] = {'count': 4, 'hidden': 8}

  count: int = 16
  hidden: int = 128
  encoder: str = 'mlp'
  layers: int = 2

  def __post_init__(self):
    super().__post_init__()
    if min(self.count, self.hidden, self.layers) < 1:
      raise ValueError(f'{self} has a size below 1.')
    if self.encoder not in ENCODERS:
      raise ValueError(f'No encoder {self.encoder!r}. Encoders: {", ".join(ENCODERS)}.')

  @property
  def gates(self):
    """Numbers of the four gates of an LSTM."""
    return 4 * self.hidden

  @property
  def both(self):
    """Outputs of the two directions."""
    return 2 * self.hidden

  def slots(self):
    into = jax.nn.initializers.lecun_normal()
    normal = jax.nn.initializers.normal(1.0)
    made = {'embed': peftlab.Slot(dims='count out', init=normal)}
    inner = 'hidden'
    if self.encoder == 'mlp':
      made |= {'w1': peftlab.Slot(dims='out hidden', init=into), 'b1': peftlab.Slot(dims='hidden')}
    else:
      inner = 'both'
      for name, size in self._cells():
        made |= {
          f'{name}_w': peftlab.Slot(dims=f'{size} gates', init=into),
          f'{name}_u': peftlab.Slot(dims='hidden gates', init=into),
          f'{name}_b': peftlab.Slot(dims='gates'),
          f'{name}_c': peftlab.Slot(dims='gates'),
        }
    return made | {
      'w2': peftlab.Slot(dims=f'{inner} {inner}', init=into),
      'b2': peftlab.Slot(dims=inner),
      'w3': peftlab.Slot(dims=f'{inner} out', init=into),
      'b3': peftlab.Slot(dims='out'),
    }

  def _cells(self):
    """(name, the word of its inputs) of every LSTM, two to a layer."""
    return [(f'{way}{i}', 'both' if i else 'out') for i in range(self.layers) for way in DIRECTIONS]

  def rows(self, p):
    """f(e) [count, out]."""
    if self.encoder == 'mlp':
      x = jax.nn.relu(p.embed @ p.w1 + p.b1)
    else:
      x = p.embed
      for i in range(self.layers):
        each = [lstm(x, p, f'{way}{i}', back=way == 'backward') for way in DIRECTIONS]
        x = jnp.concatenate(each, axis=-1)
    return jax.nn.relu(x @ p.w2 + p.b2) @ p.w3 + p.b3

  def apply(self, x, base, p):
    del base
    return peftlab.before(self.rows(p), x)


def lstm(x, p, name, *, back):
  """x [count, in] -> [count, hidden], first to last or `back`; gates in the order i, f, g, o."""
  given = x @ p[f'{name}_w'] + p[f'{name}_b'] + p[f'{name}_c']

  def step(carry, z):
    h, c = carry
    i, f, g, o = jnp.split(z + h @ p[f'{name}_u'], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h

  zeros = jnp.zeros(p[f'{name}_u'].shape[:1], x.dtype)
  return jax.lax.scan(step, (zeros, zeros), given, reverse=back)[1]

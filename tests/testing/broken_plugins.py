"""Adapter types with one mistake each. FAILS: the properties that must catch it, by type."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab import Slot

FAILS = {}


def fails(*properties):
  def add(cls):
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    FAILS[cls] = properties
    return cls

  return add


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank(peftlab.Adapter):
  """What the others get one thing wrong of."""

  rank: int = 2
  alpha: float = peftlab.initial(4.0)

  def slots(self):
    return {
      'a': Slot(dims='in rank', init=jax.nn.initializers.he_uniform()),
      'b': Slot(dims='rank out'),
      'scale': Slot(dims='', init=peftlab.constant(self.alpha), trainable=False),
    }

  def apply(self, x, base, p):
    return base(x) + ((x @ p.a) * p.scale) @ p.b

  def fuse(self, w, p):
    return w + (p.a * p.scale) @ p.b


@fails('fuse_equals_apply')
class FuseForgetsTheScale(LowRank):
  def fuse(self, w, p):
    return w + p.a @ p.b


@fails('unmergeable_refuses_to_fuse')
class SaysItCannotBeMerged(LowRank):
  mergeable = False


@fails('every_trainable_array_moves')
class ArrayNeverMoves(LowRank):
  def apply(self, x, base, p):
    return base(x) + ((x @ jax.lax.stop_gradient(p.a)) * p.scale) @ p.b


@fails('every_trainable_array_moves')
class LastLayersArrayNeverMoves(LowRank):
  """Both factors start at zero: a saddle that no gradient leaves."""

  def slots(self):
    return super().slots() | {'a': Slot(dims='in rank')}


@fails('starts_as_base')
class StartsElsewhere(LowRank):
  def slots(self):
    return super().slots() | {'b': Slot(dims='rank out', init=jax.nn.initializers.normal(1.0))}


@fails('starts_as_base')
class SaysItStartsElsewhere(LowRank):
  identity_at_start = False


@fails('starts_as_base')
class SaysItStartsElsewhereAndHardlyDoes(LowRank):
  identity_at_start = False

  def slots(self):
    return super().slots() | {'b': Slot(dims='rank out', init=jax.nn.initializers.normal(1e-5))}


@fails('random_differs_from_base', 'every_trainable_array_moves', 'loss_falls')
class DoesNothing(LowRank):
  def apply(self, x, base, p):
    return base(x) + 0 * (((x @ p.a) * p.scale) @ p.b)

  def fuse(self, w, p):
    del p
    return w


@fails('reads_no_initial_field')
class ReadsAnInitialField(LowRank):
  def apply(self, x, base, p):
    return base(x) + ((x @ p.a) * (self.alpha * p.scale / p.scale)) @ p.b


@fails('reads_no_initial_field')
class KeepsAnInitialFieldAside(LowRank):
  def __post_init__(self):
    object.__setattr__(self, 'factor', self.alpha)

  def apply(self, x, base, p):
    return base(x) + ((x @ p.a) * (p.scale / p.scale)) @ p.b * self.factor


@fails('keeps_dtype')
class BecomesFloat32(LowRank):
  def apply(self, x, base, p):
    return base(x) + super().apply(x, base, p).astype(jnp.float32) - base(x).astype(jnp.float32)


@fails('keeps_dtype')
class FusesToBfloat16(LowRank):
  def fuse(self, w, p):
    return super().fuse(w, p).astype(jnp.bfloat16)


@fails('keeps_shape', 'same_under_every_applier')
class CountsLayersItself(LowRank):
  """The layer's index by counting calls: under scan there is one call for all layers."""

  calls: ClassVar[list[int]] = []

  def apply(self, x, base, p):
    self.calls.append(len(self.calls))
    return base(x) + ((x @ p.a) * p.scale) @ p.b * float(len(self.calls))


@fails('has_no_memory')
class WritesAnAttribute(LowRank):
  def apply(self, x, base, p):
    object.__setattr__(self, 'last_rank', p.a.shape[-1])
    return super().apply(x, base, p)


@fails('has_no_memory', 'disabled_is_base', 'deltas_add_up', 'adding_leaves_the_others')
class Remembers(LowRank):
  calls: ClassVar[list[int]] = []

  def apply(self, x, base, p):
    self.calls.append(1)
    return base(x) + ((x @ p.a) * p.scale) @ p.b * float(len(self.calls))


@fails('every_slot_is_read')
class SlotNobodyReads(LowRank):
  def slots(self):
    return super().slots() | {'c': Slot(dims='rank')}


@fails('is_finite')
class DividesByTheNormOfAToken(LowRank):
  def apply(self, x, base, p):
    size = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    return base(x) + ((x / size @ p.a) * p.scale) @ p.b * size


@fails('is_finite')
class OverflowsInFloat16(LowRank):
  mergeable = False

  def apply(self, x, base, p):
    big = jnp.asarray(1e4, x.dtype)
    return base(x) + (((x @ p.a) * big * big) @ p.b) / big / big


def own_random(key, shape, dtype):
  del key
  return jnp.asarray(np.random.default_rng().normal(size=shape), dtype)


@fails('slots_are_stable', 'same_seed_same_values')
class OwnRandomNumbers(LowRank):
  def slots(self):
    return super().slots() | {'a': Slot(dims='in rank', init=own_random)}


def own_key(key, shape, dtype):
  del key
  return jax.random.normal(jax.random.key(0), shape, dtype)


@fails('layers_start_differently')
class OwnKey(LowRank):
  def slots(self):
    return super().slots() | {'a': Slot(dims='in rank', init=own_key)}


@fails('slots_are_stable')
class SlotsChange(LowRank):
  calls: ClassVar[list[int]] = []

  def slots(self):
    self.calls.append(1)
    frozen = Slot(dims='rank out', trainable=len(self.calls) % 2 == 0)
    return super().slots() | {'b': frozen}


@fails('slots_have_their_shape')
class AnotherShapeThanItSays(LowRank):
  def slots(self):
    def wide(key, shape, dtype):
      del key
      return jnp.ones((shape[0] + 1, *shape[1:]), dtype)

    return super().slots() | {'a': Slot(dims='in rank', init=wide)}


@fails('slots_have_their_shape')
class AnotherDtypeThanItSays(LowRank):
  def slots(self):
    def zeros(key, shape, dtype):
      del key, dtype
      return jnp.zeros(shape)

    return super().slots() | {'b': Slot(dims='rank out', init=zeros, dtype=jnp.bfloat16)}


@fails('keeps_shape')
class MixesTokens(LowRank):
  def apply(self, x, base, p):
    return base(x) + (((x - jnp.mean(x, axis=0, keepdims=True)) @ p.a) * p.scale) @ p.b


@fails('base_is_shared')
class WritesToTheBase(LowRank):
  def apply(self, x, base, p):
    if hasattr(base, '_view') and not isinstance(base.weight(), jax.core.Tracer):
      kernel = base._view.kernel
      kernel.set_value(kernel[...] + 0)
    return super().apply(x, base, p)


@fails('compiles_once')
class EqualsOnlyItself(LowRank):
  def __eq__(self, other):
    return self is other

  __hash__ = object.__hash__


@jax.custom_vjp
def uphill(x):
  return x


uphill.defvjp(lambda x: (x, None), lambda kept, dy: (-dy,))


@fails('loss_falls')
class GradientsPointUphill(LowRank):
  def apply(self, x, base, p):
    return base(x) + ((x @ uphill(p.a)) * p.scale) @ uphill(p.b)


@fails('dropout_is_for_training')
class DropoutIsIgnored(LowRank):
  dropout: float = 0.0


@fails('dropout_is_for_training')
class DropoutOfItsOwn(LowRank):
  dropout: float = 0.0

  def apply(self, x, base, p):
    keep = jax.random.bernoulli(jax.random.key(0), 1 - self.dropout, (x.shape[-1], 1))
    return base(x) + ((x @ (p.a * keep.astype(x.dtype))) * p.scale) @ p.b


@fails('works_on_every_layer_type', 'same_on_every_mesh')
class NeedsEvenWidths(LowRank):
  def apply(self, x, base, p):
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return base(x) + ((halves.reshape(x.shape) @ p.a) * p.scale) @ p.b


@fails('embeddings_as_claimed')
class NeedsAnArray(LowRank):
  def apply(self, x, base, p):
    return base(x) + (jnp.einsum('...i,ir->...r', x, p.a) * p.scale) @ p.b


@fails('keeps_activations_dtype')
class OverflowsInTheLayer(LowRank):
  def apply(self, x, base, p):
    kind = jnp.finfo(x.dtype)
    wrong = jnp.asarray(2.0 if kind.bits == 16 else 1.0, x.dtype)
    return base(x) + ((x @ p.a) * p.scale) @ p.b + (wrong - 1) * base(x)


@fails('asks_for_tokens_as_claimed')
class SaysItReadsTheBatch(LowRank):
  reads_batch = True


@fails('keeps_sequences')
class MixesTexts(peftlab.Adapter):
  """What a point adds to a text, taken from the text beside it."""

  point = 'inputs'
  identity_at_start = False
  mergeable = False
  mixed_batch = False

  def slots(self):
    return {'rows': Slot(dims='1 out', init=jax.nn.initializers.normal(1.0))}

  def apply(self, x, base, p):
    del base
    return peftlab.before(p.rows, jnp.roll(x, 1, axis=0))

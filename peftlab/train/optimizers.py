"""Optimizers and learning-rate schedules by name, all of them optax's."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import jax
import optax

from peftlab._registry import Registry

Number = float | jax.Array
Schedule = Callable[[Any], Any]

# name -> f(rate, *, weight_decay, b1, b2, eps) -> optax.GradientTransformation. The rate and the
# weight decay may be traced, so that changing them compiles nothing.
optimizers = Registry('optimizer')
# name -> f(steps, warmup_steps) -> schedule of a factor of the learning rate, at most 1.
schedules = Registry('schedule')


@optimizers.register('adamw')
def adamw(
  rate: Number, *, weight_decay: Number, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
  """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101)."""
  return optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


@optimizers.register('adam')
def adam(rate: Number, *, b1: float, b2: float, eps: float, **rest: Any) -> Any:
  """Adam (https://arxiv.org/abs/1412.6980)."""
  del rest
  return optax.adam(rate, b1=b1, b2=b2, eps=eps)


@optimizers.register('sgd')
def sgd(rate: Number, *, b1: float, **rest: Any) -> Any:
  """Gradient descent with momentum b1."""
  del rest
  return optax.sgd(rate, momentum=b1 or None)


@optimizers.register('lion')
def lion(rate: Number, *, weight_decay: Number, b1: float, b2: float, **rest: Any) -> Any:
  """The sign of the momentum (https://arxiv.org/abs/2302.06675)."""
  del rest
  return optax.lion(rate, b1=b1, b2=b2, weight_decay=weight_decay)


@optimizers.register('adafactor')
def adafactor(rate: Number, *, weight_decay: Number, **rest: Any) -> Any:
  """Factored second moments (https://arxiv.org/abs/1804.04235), without relative step sizes."""
  del rest
  return optax.chain(
    optax.scale_by_factored_rms(min_dim_size_to_factor=32),
    optax.clip_by_block_rms(1.0),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(rate),
  )


def _after_warmup(warmup_steps: int, schedule: Schedule) -> Schedule:
  """A linear rise to 1 over `warmup_steps`, whose first step is not lost to a rate of 0."""
  if not warmup_steps:
    return schedule
  rise = optax.linear_schedule(1 / (warmup_steps + 1), 1.0, warmup_steps)
  return optax.join_schedules([rise, schedule], [warmup_steps])


@schedules.register('constant')
def constant(steps: int, warmup_steps: int) -> Schedule:
  """1."""
  del steps
  return _after_warmup(warmup_steps, optax.constant_schedule(1.0))


@schedules.register('cosine')
def cosine(steps: int, warmup_steps: int) -> Schedule:
  """From 1 to 0 along half a cosine."""
  fall = optax.cosine_decay_schedule(1.0, max(steps - warmup_steps, 1))
  return _after_warmup(warmup_steps, fall)


@schedules.register('linear')
def linear(steps: int, warmup_steps: int) -> Schedule:
  """From 1 to 0 in a line."""
  fall = optax.linear_schedule(1.0, 0.0, max(steps - warmup_steps, 1))
  return _after_warmup(warmup_steps, fall)


@schedules.register('wsd')
def wsd(steps: int, warmup_steps: int) -> Schedule:
  """1, then in a line to 0 over the last fifth (https://arxiv.org/abs/2404.06395)."""
  start = max(steps - max(steps // 5, 1), warmup_steps)
  fall = optax.linear_schedule(1.0, 0.0, max(steps - start, 1))
  hold = optax.constant_schedule(1.0)
  return _after_warmup(warmup_steps, optax.join_schedules([hold, fall], [start - warmup_steps]))


def role_rates(pairs: tuple[str, ...]) -> dict[str, float]:
  """('b=16',) -> {'b': 16.0}.

  Raises:
    ValueError: a pair that is not ROLE=NUMBER, a number that is not finite or below 0, or a role
      that is given twice.
  """
  rates = {}
  for pair in pairs:
    role, _, number = pair.partition('=')
    try:
      rate = float(number)
    except ValueError as error:
      raise ValueError(
        f'train.role_rates has {pair!r}; expected ROLE=NUMBER, b=16 for example.'
      ) from error
    if not 0 <= rate < math.inf:
      raise ValueError(f'train.role_rates has {pair!r}; expected a finite number, at least 0.')
    if role in rates:
      raise ValueError(f'train.role_rates has the role {role!r} twice: {", ".join(pairs)}.')
    rates[role] = rate
  return rates

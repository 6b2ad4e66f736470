"""AdaLoRA: a budget of ranks moves to where it counts (Zhang et al. 2023, arXiv:2303.10512)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial

TRAINED = ('a', 'b', 'e')
DIMS = {'a': 'in rank', 'b': 'rank out', 'e': 'rank'}


@peftlab.register_adapter('adalora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaLoRA(peftlab.Adapter):
  """y = x W + s ((x A) * e) B, s = alpha / rank (eq. 3). Trainable: rank (in + out + 1) per kernel.

  After each step every triplet (column of A, number of e, row of B) has a score, its smoothed
  |weight x gradient| times the uncertainty of that (eq. 8-11); every `every` steps the e of the
  lowest scores of all kernels become 0, so many that the budget falls from rank to `target` per
  kernel along a cubic (eq. 12). The last choice stays.

  Attributes:
    rank: of every kernel at the start.
    target: ranks per kernel at the end, on average.
    alpha: see s.
    first: steps before the budget falls.
    last: steps at the end in which nothing is chosen anew.
    every: steps between two choices.
    beta1: of the running mean of the scores.
    beta2: of their uncertainty.
    orthogonal: weight of the mean of |A^T A - 1| and |B B^T - 1| in the loss.
  """

  small: ClassVar = {'rank': 4, 'target': 2}

  rank: int = 12
  target: int = 8
  alpha: float = initial(32.0)
  first: int = 0
  last: int = 0
  every: int = 1
  beta1: float = 0.85
  beta2: float = 0.85
  orthogonal: float = 0.5

  def slots(self):
    normal = jax.nn.initializers.normal(0.02)
    scale = peftlab.constant(self.alpha / (self.rank + 1e-5))
    aside = dict(trainable=False, aside=True, saved=False)
    kept = {f'{n}_{what}': peftlab.Slot(dims=DIMS[n], **aside) for n in DIMS for what in KEPT}
    return {
      'a': peftlab.Slot(dims='in rank', init=normal),
      'b': peftlab.Slot(dims='rank out', init=normal),
      'e': peftlab.Slot(dims='rank'),
      'scale': peftlab.Slot(dims='', init=scale, trainable=False),
      'chosen': peftlab.Slot(dims='rank', init=jax.nn.initializers.ones, **aside),
    } | kept

  def apply(self, x, base, p):
    return base(x) + ((x @ p.a) * (p.e * p.scale)) @ p.b

  def fuse(self, w, p):
    return w + (p.a * (p.e * p.scale)) @ p.b

  def penalty(self, p):
    if not self.orthogonal:
      return None
    one = jnp.eye(self.rank)
    far = [jnp.linalg.norm(g - one) for g in (p.a.T @ p.a, p.b @ p.b.T)]
    return self.orthogonal * (far[0] + far[1]) / 2

  def after_step(self, kernels, *, step, steps):
    found = [self._scored(k, step < steps - self.last) for k in kernels]
    scores = jnp.concatenate([jnp.ravel(score) for score, _ in found])
    drop = scores.size - self._budget(step, steps, scores.size)
    lowest = jnp.sort(scores)[jnp.maximum(drop - 1, 0)]
    choose = (step > self.first) & (step % self.every == 0) & (step < steps - self.last)
    choose = choose | (step == steps - self.last)
    after = step > steps - self.last
    changed = []
    for kernel, (score, kept) in zip(kernels, found, strict=True):
      now = ((score > lowest) | (drop < 1)).astype(jnp.float32)
      chosen = jnp.where(choose, now, kernel.values['chosen'])
      e = jnp.where(choose | after, kernel.values['e'] * chosen, kernel.values['e'])
      changed.append(kept | {'chosen': chosen, 'e': e})
    return changed

  def _budget(self, step, steps, total):
    """Ranks that may be left, of all kernels together."""
    target = total * self.target // self.rank
    span = max(steps - self.first - self.last, 1)
    left = jnp.clip(1 - (step - self.first) / span, 0.0, 1.0)
    return ((total - target) * left**3 + target).astype(jnp.int32)

  def _scored(self, kernel, count):
    """(score [layers, rank], the running means after this step)."""
    kept, score = {}, 0.0
    for name in TRAINED:
      size = jnp.abs(kernel.values[name] * kernel.gradients[name])
      old = [kernel.values[f'{name}_{what}'] for what in KEPT]
      mean = self.beta1 * old[0] + (1 - self.beta1) * size
      spread = self.beta2 * old[1] + (1 - self.beta2) * jnp.abs(size - mean)
      new = [jnp.where(count, a, b) for a, b in zip((mean, spread), old, strict=True)]
      kept |= {f'{name}_{what}': array for what, array in zip(KEPT, new, strict=True)}
      axis = {'a': 1, 'b': 2, 'e': ()}[name]
      score = score + (new[0] * new[1]).mean(axis)
    return score, kept


KEPT = ('mean', 'spread')

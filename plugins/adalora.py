"""AdaLoRA: a budget of ranks moves to where it counts (Zhang et al. 2023, arXiv:2303.10512)."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial
from peftlab.formats.peft_form import Key, PeftForm, Tensor
from peftlab.plugins import lora

DIMS = {'a': 'in rank', 'b': 'rank out', 'e': 'rank'}
KEPT = ('mean', 'spread')  # of the scores of each


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
  bounds: ClassVar = {
    **dict.fromkeys(('rank', 'target', 'every'), (1, math.inf)),
    **dict.fromkeys(('first', 'last', 'orthogonal'), (0, math.inf)),
    **dict.fromkeys(('beta1', 'beta2'), (0, 1)),
  }
  # Of pruned layers PEFT stores fewer than `rank` triplets; it is `rank` that divides alpha.
  peft = PeftForm(
    type='ADALORA',
    keys={
      'rank': Key(name='init_r', default=12, least=1),
      'target': Key(name='target_r', default=8, least=1),
      'alpha': Key(name='lora_alpha', default=8),
      'first': Key(name='tinit', default=0, least=0),
      'last': Key(name='tfinal', default=0, least=0),
      'every': Key(name='deltaT', default=1, least=1),
      'beta1': Key(name='beta1', default=0.85),
      'beta2': Key(name='beta2', default=0.85),
      'orthogonal': Key(name='orth_reg_weight', default=0.5),
    },
    tensors=(
      Tensor('a', 'lora_A', 'in rank -> rank in', on=('linear',)),
      Tensor('b', 'lora_B', 'rank out -> out rank', on=('linear',)),
      Tensor('e', 'lora_E', 'rank -> rank 1', on=('linear',)),
    ),
    scale=('alpha', 'scale'),
    cut=('rank',),
    fixed={**lora.FORM.fixed, 'use_rslora': (False, None)},
    neutral=(*lora.FORM.neutral, 'alpha_pattern', 'rank_pattern', 'r', 'total_step'),
    training=('lora_dropout',),
    starts=lora.FORM.starts,
    # PEFT needs a number of steps, which here the run has.
    more=lambda told, targets, shapes: {'total_step': 1000},
  )

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
    starts = dict(a=jax.nn.initializers.normal(0.02), b=jax.nn.initializers.normal(0.02))
    scale = peftlab.constant(self.alpha / (self.rank + 1e-5))
    aside = dict(trainable=False, aside=True, saved=False)
    found = {n: peftlab.Slot(dims=d, init=starts.get(n, peftlab.zeros)) for n, d in DIMS.items()}
    found['scale'] = peftlab.Slot(dims='', init=scale, trainable=False)
    found['chosen'] = peftlab.Slot(dims='rank', init=jax.nn.initializers.ones, **aside)
    kept = {f'{n}_{what}': peftlab.Slot(dims=DIMS[n], **aside) for n in DIMS for what in KEPT}
    return found | kept

  def apply(self, x, base, p):
    return base(x) + ((x @ p.a) * (p.e * p.scale)) @ p.b

  def fuse(self, w, p):
    return w + (p.a * (p.e * p.scale)) @ p.b

  def penalty(self, p):
    far = [jnp.linalg.norm(g - jnp.eye(self.rank)) for g in (p.a.T @ p.a, p.b @ p.b.T)]
    return self.orthogonal * (far[0] + far[1]) / 2 if self.orthogonal else None

  def after_step(self, kernels, *, step, steps):
    left = steps - self.last - step  # of the steps in which ranks are chosen
    found = [self._scored(kernel, left > 0) for kernel in kernels]
    scores = jnp.sort(jnp.concatenate([jnp.ravel(score) for score, _ in found]))
    drop = scores.size - self._budget(step, steps, scores.size)
    lowest = jnp.where(drop < 1, -jnp.inf, scores[jnp.maximum(drop - 1, 0)])
    choose = ((step > self.first) & (step % self.every == 0) & (left > 0)) | (left == 0)
    changed = []
    for kernel, (score, kept) in zip(kernels, found, strict=True):
      chosen = jnp.where(choose, (score > lowest).astype(jnp.float32), kernel.values['chosen'])
      e = jnp.where(choose | (left < 0), kernel.values['e'] * chosen, kernel.values['e'])
      changed.append(kept | {'chosen': chosen, 'e': e})
    return changed

  def _budget(self, step, steps, total):
    """Ranks that may be left, of all kernels together."""
    target, span = total * self.target // self.rank, max(steps - self.first - self.last, 1)
    left = jnp.clip(1 - (step - self.first) / span, 0.0, 1.0)
    return ((total - target) * left**3 + target).astype(jnp.int32)

  def _scored(self, kernel, count):
    """(score [layers, rank], the running means after this step)."""
    kept, score = {}, 0.0
    for name, axis in {'a': 1, 'b': 2, 'e': ()}.items():
      size = jnp.abs(kernel.values[name] * kernel.gradients[name])
      mean, spread = (kernel.values[f'{name}_{what}'] for what in KEPT)
      mean = jnp.where(count, self.beta1 * mean + (1 - self.beta1) * size, mean)
      new = self.beta2 * spread + (1 - self.beta2) * jnp.abs(size - mean)
      kept |= {f'{name}_mean': mean, f'{name}_spread': jnp.where(count, new, spread)}
      score = score + (mean * kept[f'{name}_spread']).mean(axis)
    return score, kept

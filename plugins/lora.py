"""LoRA: y = x W + s (x A) B (Hu et al. 2021, https://arxiv.org/abs/2106.09685, eq. 3)."""

import dataclasses
import math
import re

import jax
import numpy as np

import peftlab
from peftlab import initial
from peftlab.formats import hf_peft, peft_config

INITS = {
  'he_uniform': jax.nn.initializers.he_uniform(),
  'gaussian': jax.nn.initializers.normal(0.02),
  'lecun_normal': jax.nn.initializers.lecun_normal(),
}


@peftlab.register_adapter('lora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(peftlab.Adapter):
  """Low-rank adaptation. Trainable: rank (in + out) per kernel [in, out].

  Attributes:
    rank: columns of A [in, rank] and rows of B [rank, out].
    alpha: the scale s is alpha / rank, or alpha / sqrt(rank) with rslora.
    rslora: rank-stabilized scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732).
    dropout: rate of dropout on the input of A, in training only.
    init: of A: he_uniform, gaussian or lecun_normal. B starts at 0.
  """

  peft_type = 'LORA'
  peft_fields = ('rank', 'alpha', 'rslora', 'dropout')

  rank: int = 8
  alpha: float = initial(16.0)
  rslora: bool = initial(False)
  dropout: float = 0.0
  init: str = initial('he_uniform')

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f'LoRA rank is {self.rank}; it must be at least 1.')
    if self.init not in INITS:
      raise ValueError(f'No LoRA init {self.init!r}. Inits: {", ".join(INITS)}.')
    if not 0 <= self.dropout < 1:
      raise ValueError(f'LoRA dropout is {self.dropout}; it must be at least 0 and below 1.')

  def slots(self):
    if not math.isfinite(self.alpha):
      raise ValueError(f'LoRA alpha is {self.alpha}; it must be a finite number.')
    scale = self.alpha / self._divisor()
    return {
      'a': peftlab.Slot(dims='in rank', init=INITS[self.init]),
      'b': peftlab.Slot(dims='rank out'),
      'scale': peftlab.Slot(dims='', init=peftlab.constant(scale), trainable=False),
    }

  def apply(self, x, base, p):
    return base(x) + ((base.dropout(x, self.dropout) @ p.a) * p.scale) @ p.b

  def fuse(self, w, p):
    return w + (p.a * p.scale) @ p.b

  def _divisor(self):
    return math.sqrt(self.rank) if self.rslora else self.rank

  def to_peft(self, values, *, embeddings=()):
    alphas = {layer: float(v['scale']) * self._divisor() for layer, v in values.items()}
    usual = self.alpha if self.alpha in alphas.values() else next(iter(alphas.values()))
    config = {
      'r': self.rank,
      'lora_alpha': usual,
      'lora_dropout': self.dropout,
      'use_rslora': self.rslora,
      'alpha_pattern': {re.escape(k): a for k, a in alphas.items() if a != usual},
    }
    factors = {
      layer: hf_peft.Factors(a=v['a'].T, b=v['b'].T, embedding=layer in embeddings)
      for layer, v in values.items()
    }
    return config, hf_peft.to_tensors(factors)

  @classmethod
  def from_peft(cls, config, tensors):
    if config['rank_pattern'] or config['use_dora']:
      raise ValueError('A PEFT folder with rank_pattern or use_dora is not a plain LoRA.')
    adapter = cls(
      rank=config['r'],
      alpha=config['lora_alpha'],
      rslora=config['use_rslora'],
      dropout=config['lora_dropout'],
    )
    values = {}
    for layer, factors in hf_peft.to_factors(tensors).items():
      scale = np.float32(peft_config.scale_of(config, layer))
      values[layer] = {'a': factors.a.T, 'b': factors.b.T, 'scale': np.asarray(scale)}
    return adapter, values

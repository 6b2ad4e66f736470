"""LoRA: y = x W + s (x A) B (Hu et al. 2021, https://arxiv.org/abs/2106.09685, eq. 3)."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab import initial
from peftlab.formats import hf_peft, peft_config

INITS = {
  'he_uniform': jax.nn.initializers.he_uniform(),
  'gaussian': jax.nn.initializers.normal(0.02),
  'lecun_normal': jax.nn.initializers.lecun_normal(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank(peftlab.Adapter):
  """What LoRA and the types near it share: the factors' rank, the scale, dropout.

  Attributes:
    rank: columns of A [in, rank] and rows of B [rank, out].
    alpha: the scale s is alpha / rank, or alpha / sqrt(rank) with rslora.
    rslora: rank-stabilized scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732).
    dropout: rate of dropout on the input of A, in training only.
  """

  rank: int = 8
  alpha: float = initial(16.0)
  rslora: bool = initial(False)
  dropout: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    kind = type(self).__name__
    if self.rank < 1:
      raise ValueError(f'{kind} rank is {self.rank}; it must be at least 1.')
    if not 0 <= self.dropout < 1:
      raise ValueError(f'{kind} dropout is {self.dropout}; it must be at least 0 and below 1.')

  def slots(self):
    if not math.isfinite(self.alpha):
      raise ValueError(f'{type(self).__name__} alpha is {self.alpha}; it must be a finite number.')
    return {
      'a': peftlab.Slot(dims='in rank', init=INITS['he_uniform']),
      'b': peftlab.Slot(dims='rank out'),
      'scale': peftlab.Slot(dims='', init=peftlab.constant(self.scale), trainable=False),
    }

  def apply(self, x, base, p):
    return base(x) + ((base.dropout(x, self.dropout) @ p.a) * p.scale) @ p.b

  def fuse(self, w, p):
    return w + (p.a * p.scale) @ p.b

  @property
  def scale(self) -> float:
    """The s that the adapter starts with."""
    return self.alpha / self._divisor()

  def _divisor(self):
    return math.sqrt(self.rank) if self.rslora else self.rank


@peftlab.register_adapter('lora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(LowRank):
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

  init: str = initial('he_uniform')

  def __post_init__(self):
    super().__post_init__()
    if self.init not in INITS:
      raise ValueError(f'No LoRA init {self.init!r}. Inits: {", ".join(INITS)}.')

  def slots(self):
    slots = super().slots()
    return slots | {'a': dataclasses.replace(slots['a'], init=INITS[self.init])}

  def to_factors(self, p):
    return p.a * p.scale, p.b

  @classmethod
  def from_factors(cls, a, b, bias=None):
    if bias is not None:
      raise ValueError(f'{cls.__name__} cannot hold a change of a bias.')
    adapter = cls(rank=a.shape[1], alpha=float(a.shape[1]))
    return adapter, {'a': a, 'b': b, 'scale': jnp.ones(())}

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

"""LoRA: y = x W + s (x A) B (Hu et al. 2021, https://arxiv.org/abs/2106.09685, eq. 3)."""

import dataclasses
import math

import jax
import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor

INITS = {
  'he_uniform': jax.nn.initializers.he_uniform(),
  'gaussian': jax.nn.initializers.normal(0.02),
  'lecun_normal': jax.nn.initializers.lecun_normal(),
}

FORM = PeftForm(
  type='LORA',
  keys={
    'rank': Key(name='r', least=1, pattern='rank_pattern'),
    'alpha': Key(name='lora_alpha', pattern='alpha_pattern'),
    'rslora': Key(name='use_rslora', default=False),
    'dropout': Key(name='lora_dropout', default=0.0, least=0, below=1),
  },
  tensors=(
    Tensor('a', 'lora_A.weight', 'in rank -> rank in', on=('linear',)),
    Tensor('b', 'lora_B.weight', 'rank out -> out rank', on=('linear',)),
    Tensor('a', 'lora_embedding_A', 'in rank -> rank in', on=('embedding',)),
    Tensor('b', 'lora_embedding_B', 'rank out -> out rank', on=('embedding',)),
  ),
  scale=('alpha', 'scale'),
  padded=('rank',),
  besides=('modules_to_save', 'trainable_token_indices'),
  # Off, or it is another type (there is no `lora_bias` here); what starts it is of no account.
  fixed={'use_dora': (False,), 'lora_bias': (False, None), 'use_qalora': (False, None)}
  | dict.fromkeys(('alora_invocation_tokens', 'layer_replication', 'target_parameters'), (None, []))
  | dict.fromkeys(('arrow_config', 'kasa_config', 'monteclora_config', 'velora_config'), (None,))
  | {'use_bdlora': (None, False)},
  neutral=(
    *('corda_config', 'eva_config', 'loftq_config', 'lora_ga_config', 'runtime_config'),
    *('ensure_weight_tying', 'megatron_config', 'megatron_core', 'qalora_group_size'),
  ),
  starts={'init_lora_weights': (True, False, None, 'gaussian', 'eva', 'orthogonal')},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank(peftlab.Adapter):
  """What LoRA and the types near it share: the factors' rank, the scale, dropout.

  Attributes:
    rank: columns of A [in, rank] and rows of B [rank, out].
    alpha: the scale s is alpha / rank, or alpha / sqrt(rank) with rslora.
    rslora: rank-stabilized scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732).
    dropout: rate of dropout on the input of A, in training only.
  """

  peft = FORM
  rank: int = 8
  alpha: float = peftlab.initial(16.0)
  rslora: bool = peftlab.initial(False)
  dropout: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    kind = type(self).__name__
    if not 0 <= self.dropout < 1:
      raise ValueError(f'{kind} dropout is {self.dropout}; it must be at least 0 and below 1.')

  def slots(self):
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
    return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@peftlab.register_adapter('lora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(LowRank):
  """Low-rank adaptation. Trainable: rank (in + out) per kernel [in, out].

  Attributes:
    init: of A: he_uniform, gaussian or lecun_normal. B starts at 0.
  """

  peft = FORM
  init: str = peftlab.initial('he_uniform')

  def __post_init__(self):
    super().__post_init__()
    if self.init not in INITS:
      raise ValueError(f'No LoRA init {self.init!r}. Inits: {", ".join(INITS)}.')

  def slots(self):
    return super().slots() | {'a': peftlab.Slot(dims='in rank', init=INITS[self.init])}

  def to_factors(self, p):
    return p.a * p.scale, p.b

  @classmethod
  def from_factors(cls, a, b, bias=None):
    if bias is not None:
      raise ValueError(f'{cls.__name__} cannot hold a change of a bias.')
    rank = a.shape[1]
    return cls(rank=rank, alpha=float(rank)), {'a': a, 'b': b, 'scale': jnp.ones(())}

"""The options that a decoder's config is made of: rope, experts, latent attention, delta rule."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import math
from typing import Any

from peftlab import _registry

EXPERT_LAYOUTS = ('halves', 'interleaved', 'separate')
METHODS = ('dense', 'sorted')
SCALINGS = ('factors', 'linear', 'llama3', 'none', 'proportional', 'yarn')
SCORINGS = ('chosen', 'sigmoid', 'softmax')


def check_choice(name: str, given: Any, choices: Iterable[str]) -> None:
  """Raises ValueError unless `given` is one of `choices`; the message names the nearest."""
  choices = sorted(choices)
  if given not in choices:
    near = _registry.did_you_mean(given, choices)
    raise ValueError(f'{name} is {given!r}{near or "."} Choices: {", ".join(choices)}.')


def check_positive(owner: Any, *names: str, kind: type | tuple = int) -> None:
  """Raises ValueError unless the fields of `owner` are finite numbers above 0."""
  for name in names:
    value = getattr(owner, name)
    number = isinstance(value, kind) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
      what = 'an integer' if kind is int else 'a number'
      raise ValueError(f'{type(owner).__name__}.{name} is {value!r}; it must be {what} above 0.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.4).

  Attributes:
    theta: base of the geometric series of wavelengths.
    scaling: none; linear (frequencies / factor); llama3 (only the long wavelengths, smoothly);
      yarn (https://arxiv.org/abs/2309.00071, section 3.2); factors (frequencies / factors, one
      number each, as llama.cpp stores them); proportional (only the first `fraction` turns).
    factor: by how much the context was stretched (linear, llama3, yarn).
    low_freq_factor: llama3: wavelengths above original_length / this are fully scaled.
    high_freq_factor: llama3: wavelengths below original_length / this are left alone.
    original_length: llama3, yarn: the context of pretraining, in tokens.
    factors: of 'factors', head_dim / 2 numbers.
    beta_fast: yarn: dimensions that turn more often than this in the original length are kept.
    beta_slow: yarn: those that turn less often than this are fully scaled.
    truncate: yarn: the bounds between them are rounded to whole dimensions.
    amplitude: cosine and sine are multiplied by it (yarn).
    fraction: proportional: the part of the pairs that turns.
  """

  theta: float = 10_000.0
  scaling: str = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192
  factors: tuple[float, ...] = ()
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  amplitude: float = 1.0
  fraction: float = 1.0

  def __post_init__(self):
    check_choice('Rope.scaling', self.scaling, SCALINGS)
    numbers = ('theta', 'factor', 'low_freq_factor', 'high_freq_factor', 'beta_fast', 'beta_slow')
    check_positive(self, *numbers, 'amplitude', 'fraction', kind=(int, float))
    check_positive(self, 'original_length')
    if self.scaling == 'llama3' and self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f'Rope.high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor '
        f'({self.low_freq_factor}).'
      )
    if self.scaling == 'yarn' and self.theta == 1:
      raise ValueError('Rope.theta is 1; yarn divides by its logarithm.')
    if self.fraction > 1:
      raise ValueError(f'Rope.fraction is {self.fraction}; it must be at most 1.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A layer of experts: MLPs of which a router chooses a few per token.

  Attributes:
    count, chosen, width: how many there are, how many a token meets, the width of each.
    scoring: a router's logits -> scores: softmax (over all), sigmoid, or chosen (softmax over the
      chosen logits alone).
    normalize: the scores of the chosen are divided by their sum.
    scale: factor of the weights of the chosen.
    groups, chosen_groups: experts lie in so many groups, of which so many may be chosen from.
    correction: the choice, and it alone, adds a bias per expert to the scores.
    router_bias, bias: whether router and experts have biases.
    layout: gate and up are two kernels (separate), or one with the columns of gate first (halves)
      or every other (interleaved).
    limit: gate is clamped from above and up on both sides, and the activation is gate *
      sigmoid(1.702 gate) * (up + 1); None: the config's own.
    shared: width of an MLP that every token meets; 0: none.
    shared_gate: its output is multiplied by a sigmoid of its own.
    beside_mlp: every layer has a dense MLP as well, and the router reads the residual stream.
    method: sorted (tokens are sorted by expert, each meets its own) or dense (each expert sees
      every token: for checking).
  """

  count: int
  chosen: int
  width: int
  scoring: str = 'softmax'
  normalize: bool = True
  scale: float = 1.0
  groups: int = 1
  chosen_groups: int = 1
  correction: bool = False
  router_bias: bool = False
  bias: bool = False
  layout: str = 'separate'
  limit: float | None = None
  shared: int = 0
  shared_gate: bool = False
  beside_mlp: bool = False
  method: str = 'sorted'

  def __post_init__(self):
    check_positive(self, 'count', 'chosen', 'width', 'groups', 'chosen_groups')
    check_positive(self, 'scale', kind=(int, float))
    if self.limit is not None:
      check_positive(self, 'limit', kind=(int, float))
    check_choice('Experts.scoring', self.scoring, SCORINGS)
    check_choice('Experts.layout', self.layout, EXPERT_LAYOUTS)
    check_choice('Experts.method', self.method, METHODS)
    if self.count % self.groups:
      raise ValueError(f'Experts.count is {self.count}; {self.groups} groups do not divide it.')
    if self.chosen_groups > self.groups:
      raise ValueError(f'Experts.chosen_groups is {self.chosen_groups} of {self.groups} groups.')
    room = self.count // self.groups * self.chosen_groups
    if self.chosen > room:
      raise ValueError(f'Experts.chosen is {self.chosen}; there are {room} to choose from.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

  Attributes:
    q_rank: of the queries' low-rank projection; None: a plain one.
    kv_rank: size of the latent vector that keys and values are made from.
    nope_dim, rope_dim: the parts of a query or key head without and with positions.
    value_dim: of a value head.
    norm_eps: of the norms inside.
  """

  q_rank: int | None
  kv_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  norm_eps: float = 1e-6

  def __post_init__(self):
    check_positive(self, 'kv_rank', 'nope_dim', 'rope_dim', 'value_dim')
    check_positive(self, 'norm_eps', kind=(int, float))
    if self.q_rank is not None:
      check_positive(self, 'q_rank')
    if self.rope_dim % 2:
      raise ValueError(f'Latent.rope_dim is {self.rope_dim}; it must be even for RoPE.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """Gated delta net (https://arxiv.org/abs/2412.06464): attention with a state of fixed size.

  Attributes:
    key_heads, value_heads: each key head serves value_heads / key_heads.
    key_dim, value_dim: of one head; the state of a value head is [key_dim, value_dim].
    window: tokens that the causal convolution in front sees.
    chunk: tokens that are computed at once.
  """

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  window: int
  chunk: int = 64

  def __post_init__(self):
    check_positive(self, 'key_heads', 'value_heads', 'key_dim', 'value_dim', 'window', 'chunk')
    if self.value_heads % self.key_heads:
      raise ValueError(
        f'Delta.value_heads is {self.value_heads}; it must be a multiple of key_heads '
        f'({self.key_heads}).'
      )

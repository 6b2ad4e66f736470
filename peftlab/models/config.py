"""The configuration of a decoder: every option that changes its maths, validated."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import math
from typing import Any

from peftlab import _registry

ACTIVATIONS = ('gelu', 'gelu_tanh', 'silu')
DTYPES = ('bfloat16', 'float16', 'float32')
LAYOUTS = ('half', 'interleaved')
SCALINGS = ('factors', 'linear', 'llama3', 'none')


def check_choice(name: str, given: Any, choices: Iterable[str]) -> None:
  """Raises ValueError unless `given` is one of `choices`; the message names the nearest."""
  choices = sorted(choices)
  if given not in choices:
    near = _registry.did_you_mean(given, choices)
    raise ValueError(f'{name} is {given!r}{near or "."} Choices: {", ".join(choices)}.')


def _check_positive(owner: Any, *names: str, kind: type | tuple = int) -> None:
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
      factors (frequencies / factors, one number each, as llama.cpp stores them).
    factor: by how much the context was stretched (linear, llama3).
    low_freq_factor: llama3: wavelengths above original_length / this are fully scaled.
    high_freq_factor: llama3: wavelengths below original_length / this are left alone.
    original_length: llama3: the context of pretraining, in tokens.
    factors: of 'factors', head_dim / 2 numbers.
  """

  theta: float = 10_000.0
  scaling: str = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192
  factors: tuple[float, ...] = ()

  def __post_init__(self):
    check_choice('Rope.scaling', self.scaling, SCALINGS)
    numbers = ('theta', 'factor', 'low_freq_factor', 'high_freq_factor')
    _check_positive(self, *numbers, kind=(int, float))
    _check_positive(self, 'original_length')
    if self.scaling == 'llama3' and self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f'Rope.high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor '
        f'({self.low_freq_factor}).'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
  """A decoder-only transformer.

  Attributes:
    family: registered model family, which knows the names of its weights in files.
    vocab, layers, embed, mlp: vocabulary, blocks, width of the residual stream and of the MLP.
    q_heads, kv_heads, head_dim: attention heads; each kv head serves q_heads / kv_heads.
    max_length: longest context in tokens (a cache may not be longer).
    norm_eps: added to the mean square in RMSNorm.
    norm_unit_offset: norms multiply by 1 + scale (Gemma) instead of scale.
    activation: of the gated MLP: silu (SwiGLU), gelu_tanh or gelu (GeGLU).
    tied: the head is the embedding table.
    embed_scale: the embedding is multiplied by it (Gemma: sqrt(embed)).
    rope: rotary embedding of the layers with full attention.
    local_rope: of the layers with a window; None: the same.
    rope_layout: which dimensions of a head are rotated together: i and i + head_dim / 2 (half,
      Hugging Face) or 2 i and 2 i + 1 (interleaved).
    windows: per layer, how many tokens back (its own included) a token sees; 0: all. () for none.
    attention_scale: factor of the scores; None: head_dim ** -0.5.
    attention_softcap: scores become cap * tanh(scores / cap); None: no cap.
    logit_softcap: likewise for the logits.
    qk_norm: RMSNorm on each query and key head.
    post_norms: RMSNorm also on the output of attention and MLP.
    qkv_bias, o_bias, mlp_bias: whether these projections have biases.
    dtype: of weights and activations; norms and softmax are computed in float32.
  """

  family: str
  vocab: int
  layers: int
  embed: int
  mlp: int
  q_heads: int
  kv_heads: int
  head_dim: int
  max_length: int
  norm_eps: float = 1e-6
  norm_unit_offset: bool = False
  activation: str = 'silu'
  tied: bool = True
  embed_scale: float = 1.0
  rope: Rope = Rope()
  local_rope: Rope | None = None
  rope_layout: str = 'half'
  windows: tuple[int, ...] = ()
  attention_scale: float | None = None
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  qk_norm: bool = False
  post_norms: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  dtype: str = 'float32'

  def __post_init__(self):
    sizes = ('vocab', 'layers', 'embed', 'mlp', 'q_heads', 'kv_heads', 'head_dim', 'max_length')
    _check_positive(self, *sizes)
    _check_positive(self, 'norm_eps', 'embed_scale', kind=(int, float))
    for cap in ('attention_scale', 'attention_softcap', 'logit_softcap'):
      if getattr(self, cap) is not None:
        _check_positive(self, cap, kind=(int, float))
    check_choice('DecoderConfig.activation', self.activation, ACTIVATIONS)
    check_choice('DecoderConfig.rope_layout', self.rope_layout, LAYOUTS)
    check_choice('DecoderConfig.dtype', self.dtype, DTYPES)
    self._check_heads()
    self._check_layers()

  def _check_heads(self):
    if self.q_heads % self.kv_heads:
      raise ValueError(
        f'DecoderConfig.q_heads is {self.q_heads}; it must be a multiple of kv_heads '
        f'({self.kv_heads}).'
      )
    if self.head_dim % 2:
      raise ValueError(f'DecoderConfig.head_dim is {self.head_dim}; it must be even for RoPE.')
    for rope in (self.rope, self.local_rope):
      if rope and rope.scaling == 'factors' and len(rope.factors) != self.head_dim // 2:
        raise ValueError(
          f'Rope.factors has {len(rope.factors)} numbers; head_dim {self.head_dim} needs '
          f'{self.head_dim // 2}.'
        )

  def _check_layers(self):
    if self.windows and len(self.windows) != self.layers:
      raise ValueError(
        f'DecoderConfig.windows has {len(self.windows)} entries for {self.layers} layers.'
      )
    if any(window < 0 for window in self.windows):
      raise ValueError(f'DecoderConfig.windows is {self.windows}; a window is 0 (none) or above.')

  def layer_rope(self, layer: int) -> Rope:
    """The rotary embedding of one layer."""
    local = bool(self.windows) and self.windows[layer] > 0
    return self.local_rope if local and self.local_rope is not None else self.rope

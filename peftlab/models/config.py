"""The configuration of a decoder: every option that changes its maths, validated."""

from __future__ import annotations

import dataclasses

from peftlab.models.options import Delta, Experts, Latent, Rope, check_choice, check_positive

ACTIVATIONS = ('gelu', 'gelu_tanh', 'silu')
DTYPES = ('bfloat16', 'float16', 'float32')
LAYOUTS = ('half', 'interleaved')
MIXERS = ('attention', 'delta')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
  """What shapes the arrays of one layer: layers of one kind can be stacked.

  Attributes:
    mixer: attention, latent or delta.
    head_dim, kv_heads: of its attention.
    keys_are_values: it has no projection of values.
    reads_keys: it has neither keys nor values, and attends to those of an earlier layer.
    local: it has a window; told only where keys are handed on to later layers of the same type.
    experts: whether it has experts.
    mlp: width of its dense MLP; 0: none.
  """

  mixer: str
  head_dim: int
  kv_heads: int
  keys_are_values: bool
  reads_keys: bool
  local: bool
  experts: bool
  mlp: int


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
    rope_dims: how many leading dimensions of a head are rotated; None: all.
    windows: per layer, how many tokens back (its own included) a token sees; 0: all. () for none.
    global_head_dim, global_kv_heads: head_dim and kv_heads of the layers without a window, where
      others have one; None: the same.
    keys_are_values: those layers have no projection of values: they are the keys', before their
      norm and rotation.
    shared_keys: so many of the last layers attend to the keys and values of the last earlier layer
      of their type (window or none).
    shared_keys_mlp: width of the MLP of those; None: the same.
    mixers: per layer, attention or delta; () for attention in all.
    latent: attention is multi-head latent attention; q_heads, rope and max_length concern it.
    delta: of the layers with mixer delta.
    experts: of the layers with experts.
    sparse: per layer, whether it has experts; () for all (none without `experts`).
    attention_scale: factor of the scores; None: head_dim ** -0.5.
    attention_softcap: scores become cap * tanh(scores / cap); None: no cap.
    logit_softcap: likewise for the logits.
    sinks: each query head has a logit that takes part in the softmax and has no value.
    output_gate: attention's output is multiplied by a sigmoid that is projected with the queries.
    qk_norm: RMSNorm on each query and key head.
    value_norm: values are divided by their root mean square.
    post_norms: RMSNorm also on the output of attention and MLP.
    layer_scalar: the stream is multiplied by a number after each layer.
    per_layer_embed: size of an embedding of the token that each layer has of its own; 0: none.
    per_layer_vocab: its vocabulary.
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
  rope: Rope = dataclasses.field(default_factory=Rope)
  local_rope: Rope | None = None
  rope_layout: str = 'half'
  rope_dims: int | None = None
  windows: tuple[int, ...] = ()
  global_head_dim: int | None = None
  global_kv_heads: int | None = None
  keys_are_values: bool = False
  shared_keys: int = 0
  shared_keys_mlp: int | None = None
  mixers: tuple[str, ...] = ()
  latent: Latent | None = None
  delta: Delta | None = None
  experts: Experts | None = None
  sparse: tuple[bool, ...] = ()
  attention_scale: float | None = None
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  sinks: bool = False
  output_gate: bool = False
  qk_norm: bool = False
  value_norm: bool = False
  post_norms: bool = False
  layer_scalar: bool = False
  per_layer_embed: int = 0
  per_layer_vocab: int = 0
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  dtype: str = 'float32'

  def __post_init__(self):
    sizes = ('vocab', 'layers', 'embed', 'mlp', 'q_heads', 'kv_heads', 'head_dim', 'max_length')
    check_positive(self, *sizes)
    check_positive(self, 'norm_eps', 'embed_scale', kind=(int, float))
    for option in ('rope_dims', 'global_head_dim', 'global_kv_heads', 'shared_keys_mlp'):
      if getattr(self, option) is not None:
        check_positive(self, option)
    for cap in ('attention_scale', 'attention_softcap', 'logit_softcap'):
      if getattr(self, cap) is not None:
        check_positive(self, cap, kind=(int, float))
    check_choice('DecoderConfig.activation', self.activation, ACTIVATIONS)
    check_choice('DecoderConfig.rope_layout', self.rope_layout, LAYOUTS)
    check_choice('DecoderConfig.dtype', self.dtype, DTYPES)
    self._check_heads()
    self._check_layers()

  def _check_heads(self):
    for kv_heads in (self.kv_heads, self.global_kv_heads or self.kv_heads):
      if self.q_heads % kv_heads:
        raise ValueError(
          f'DecoderConfig.q_heads is {self.q_heads}; it must be a multiple of kv_heads '
          f'({kv_heads}).'
        )
    for head_dim in (self.head_dim, self.global_head_dim or self.head_dim):
      if head_dim % 2:
        raise ValueError(f'DecoderConfig.head_dim is {head_dim}; it must be even for RoPE.')
    if self.rope_dims is not None and (self.rope_dims % 2 or self.rope_dims > self.head_dim):
      raise ValueError(
        f'DecoderConfig.rope_dims is {self.rope_dims}; it must be even and at most head_dim '
        f'({self.head_dim}).'
      )
    if self.local_rope and self.local_rope.amplitude != self.rope.amplitude:
      raise ValueError(
        f'Rope.amplitude of local_rope is {self.local_rope.amplitude}; it must be that of rope '
        f'({self.rope.amplitude}).'
      )
    for rope in (self.rope, self.local_rope):
      if rope and rope.scaling == 'factors' and len(rope.factors) != self.head_dim // 2:
        raise ValueError(
          f'Rope.factors has {len(rope.factors)} numbers; head_dim {self.head_dim} needs '
          f'{self.head_dim // 2}.'
        )

  def _check_layers(self):
    for name in ('windows', 'mixers', 'sparse'):
      given = getattr(self, name)
      if given and len(given) != self.layers:
        raise ValueError(f'DecoderConfig.{name} has {len(given)} entries for {self.layers} layers.')
    if any(window < 0 for window in self.windows):
      raise ValueError(f'DecoderConfig.windows is {self.windows}; a window is 0 (none) or above.')
    for mixer in self.mixers:
      check_choice('A mixer of DecoderConfig', mixer, MIXERS)
    if 'delta' in self.mixers and self.delta is None:
      raise ValueError('DecoderConfig.mixers names delta; DecoderConfig.delta is None.')
    if any(self.sparse) and self.experts is None:
      raise ValueError('DecoderConfig.sparse has layers with experts; experts is None.')
    self._check_shared_keys()

  def _check_shared_keys(self):
    first = self.layers - self.shared_keys
    for layer in range(first, self.layers):
      if all(self.is_local(i) != self.is_local(layer) for i in range(first)):
        raise ValueError(
          f'DecoderConfig.shared_keys is {self.shared_keys}, but no layer before {first} is of the '
          f'type of layer {layer}.'
        )

  def is_local(self, layer: int) -> bool:
    """Whether a layer has a window."""
    return bool(self.windows) and self.windows[layer] > 0

  def layer_rope(self, layer: int) -> Rope:
    """The rotary embedding of one layer."""
    local = self.is_local(layer)
    return self.local_rope if local and self.local_rope is not None else self.rope

  def kind(self, layer: int) -> LayerKind:
    """What shapes the arrays of one layer."""
    wide = bool(self.windows) and not self.is_local(layer)  # global among local ones
    mixer = self.mixers[layer] if self.mixers else 'attention'
    if mixer == 'attention' and self.latent is not None:
      mixer = 'latent'
    reads = layer >= self.layers - self.shared_keys
    experts = self.experts is not None and (not self.sparse or self.sparse[layer])
    beside = experts and self.experts is not None and self.experts.beside_mlp
    mlp = self.shared_keys_mlp if reads and self.shared_keys_mlp is not None else self.mlp
    return LayerKind(
      mixer=mixer,
      head_dim=self.global_head_dim if wide and self.global_head_dim else self.head_dim,
      kv_heads=self.global_kv_heads if wide and self.global_kv_heads else self.kv_heads,
      keys_are_values=wide and self.keys_are_values,
      reads_keys=reads,
      local=self.shared_keys > 0 and self.is_local(layer),
      experts=experts,
      mlp=mlp if beside or not experts else 0,
    )

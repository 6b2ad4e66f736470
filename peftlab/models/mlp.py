"""The MLPs of a block: gated and dense, experts, and both beside each other."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from peftlab import _parts, _specs
from peftlab.models.config import DecoderConfig
from peftlab.models.experts import ExpertDense
from peftlab.models.layers import Dense, RMSNorm
from peftlab.models.options import Experts
from peftlab.models.routing import Router, by_expert

ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu': lambda x: jax.nn.gelu(x, approximate=False),
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
}
_CLAMPED_SLOPE = 1.702  # of gpt_oss: gate * sigmoid(1.702 gate), nearly gelu


def norm_of(config: DecoderConfig) -> RMSNorm:
  """A norm of the residual stream."""
  return RMSNorm(
    config.embed,
    eps=config.norm_eps,
    unit_offset=config.norm_unit_offset,
    dtype=jnp.dtype(config.dtype),
  )


class GatedMLP(nnx.Module):
  """down(activation(gate(x)) * up(x)): SwiGLU or GeGLU (https://arxiv.org/abs/2002.05202)."""

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, width: int | None = None):
    c = config
    embed, mlp = {'embed': c.embed}, {'mlp': width or c.mlp}
    options: dict[str, Any] = dict(bias=c.mlp_bias, dtype=jnp.dtype(c.dtype), rngs=rngs, role='mlp')
    self.gate = Dense(embed, mlp, **options)
    self.up = Dense(embed, mlp, **options)
    self.down = Dense(mlp, embed, **options)
    self.activation = c.activation

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, length, embed] -> the same shape."""
    flat = rearrange(x, 'b l e -> (b l) e')
    hidden = ACTIVATIONS[self.activation](self.gate(flat)) * self.up(flat)
    hidden = rearrange(hidden, '(b l) m -> b l m', b=x.shape[0])
    hidden = _specs.constrain(hidden, ('batch', 'length', 'mlp'))
    y = self.down(rearrange(hidden, 'b l m -> (b l) m'))
    return rearrange(y, '(b l) e -> b l e', b=x.shape[0])


class ExpertStack(nnx.Module):
  """One gated MLP per expert, on tokens sorted by expert.

  Attributes:
    gate, up: ExpertDense embed -> mlp; None where `gate_up` holds both.
    gate_up: ExpertDense embed -> 2 mlp, or None.
    down: ExpertDense mlp -> embed.
  """

  def __init__(self, config: DecoderConfig, options: Experts, *, rngs: nnx.Rngs):
    o = options
    embed = {'embed': config.embed}
    more: dict[str, Any] = dict(bias=o.bias, dtype=jnp.dtype(config.dtype), rngs=rngs)
    separate = o.layout == 'separate'
    self.gate = ExpertDense(o.count, embed, {'mlp': o.width}, **more) if separate else None
    self.up = ExpertDense(o.count, embed, {'mlp': o.width}, **more) if separate else None
    self.gate_up = None if separate else ExpertDense(o.count, embed, {'mlp': 2 * o.width}, **more)
    self.down = ExpertDense(o.count, {'mlp': o.width}, embed, **more)
    self.activation = config.activation
    self.options = options

  def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x [rows, embed], sorted by expert, group_sizes [experts] -> [rows, embed]."""
    gate, up = self._gate_and_up(x, group_sizes)
    if self.options.limit is None:
      return self.down(ACTIVATIONS[self.activation](gate) * up, group_sizes)
    limit = jnp.asarray(self.options.limit, x.dtype)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    slope, one = (jnp.asarray(number, x.dtype) for number in (_CLAMPED_SLOPE, 1))
    return self.down(gate * jax.nn.sigmoid(slope * gate) * (up + one), group_sizes)

  def _gate_and_up(self, x: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    if self.gate_up is None:
      assert self.gate is not None
      assert self.up is not None
      return self.gate(x, group_sizes), self.up(x, group_sizes)
    both = self.gate_up(x, group_sizes)
    if self.options.layout == 'interleaved':
      return both[:, 0::2], both[:, 1::2]
    gate, up = jnp.split(both, 2, axis=-1)
    return gate, up


class ExpertMLP(nnx.Module):
  """A router, the experts that it chooses from, and perhaps an MLP that every token meets.

  Attributes:
    router: Router.
    experts: ExpertStack.
    shared: GatedMLP or None.
    shared_gate: Dense embed -> 1 or None.
  """

  def __init__(self, config: DecoderConfig, options: Experts, *, rngs: nnx.Rngs):
    o, dtype = options, jnp.dtype(config.dtype)
    self.router = Router(config.embed, o, eps=config.norm_eps, dtype=dtype, rngs=rngs)
    self.experts = ExpertStack(config, o, rngs=rngs)
    self.shared = GatedMLP(config, rngs=rngs, width=o.shared) if o.shared else None
    gate = ({'embed': config.embed}, {'gate': 1})
    gated = bool(o.shared) and o.shared_gate
    self.shared_gate = Dense(*gate, dtype=dtype, rngs=rngs, role='router') if gated else None
    self.options = options

  def __call__(
    self, x: jax.Array, counted: jax.Array | None = None, *, routed_by: jax.Array | None = None
  ) -> jax.Array:
    """x [batch, length, embed] -> the same shape.

    Args:
      x: what the experts see.
      counted: [batch, length] bool, the tokens of which the router keeps its record; None: all.
      routed_by: what the router sees; None: the same.
    """
    flat = rearrange(x, 'b l e -> (b l) e')
    seen = flat if routed_by is None else rearrange(routed_by, 'b l e -> (b l) e')
    counted = None if counted is None else counted.reshape(-1)
    weights, chosen = self.router(seen, counted)
    y = self._by_expert(flat, weights, chosen, axes=_specs.batch_axes(x.shape[0]))
    y = rearrange(y, '(b l) e -> b l e', b=x.shape[0])
    y = _specs.constrain(y, ('batch', 'length', 'embed'))
    if self.shared is None:
      return y
    shared = self.shared(x)
    if self.shared_gate is not None:
      shared = jax.nn.sigmoid(self.shared_gate(x)) * shared
    return y + shared

  def _by_expert(
    self, x: jax.Array, weights: jax.Array, chosen: jax.Array, *, axes: tuple[str, ...]
  ) -> jax.Array:
    """What the experts say of x [tokens, embed]; see `by_expert`.

    Sorting is of the tokens that a device holds: sorted over the whole batch, a row would belong to
    any device, and XLA would send all rows to all. So the mesh axes of the batch are manual here;
    what the experts hold is gathered over them as it is held, codes as codes.

    Args:
      x: the tokens.
      weights: [tokens, chosen].
      chosen: [tokens, chosen] int32.
      axes: the mesh axes over which the tokens lie.
    """
    options = dict(count=self.options.count, method=self.options.method)
    if not axes:
      return by_expert(self.experts, x, weights, chosen, **options)

    def local(parts: _parts.Parts, *arrays: jax.Array) -> tuple[jax.Array, Any]:
      experts: Any = _parts.merge(_with_keys_of(parts, axes))
      y = by_expert(experts, *arrays, **options)
      return y, _without_keys(_parts.split(experts).state)

    cut = PartitionSpec(axes)
    run = jax.shard_map(
      local,
      in_specs=(PartitionSpec(), cut, cut, cut),
      out_specs=(cut, PartitionSpec()),
      axis_names=set(axes),
      check_vma=False,  # as in the pipeline: an adapter may carry what it likes
    )
    y, state = run(_parts.split(self.experts), x, weights, chosen)
    held = _parts.variables(self.experts)
    for path, value in _parts.flat(state).items():
      held[path][...] = value
    return y


def _with_keys_of(parts: _parts.Parts, axes: tuple[str, ...]) -> _parts.Parts:
  """The parts with other random keys on every device of the mesh axes, which are manual here."""
  here = jax.lax.axis_index(axes)

  def own(array: Any) -> Any:
    if not _parts.is_key(array):
      return array
    folded = jax.vmap(lambda key: jax.random.fold_in(key, here))(array.reshape(-1))
    return folded.reshape(array.shape)

  return parts.replace(state=jax.tree.map(own, parts.state))


def _without_keys(state: Any) -> Any:
  return _parts.nest({path: a for path, a in _parts.flat(state).items() if not _parts.is_key(a)})


class MLPBesideExperts(nnx.Module):
  """A dense MLP and experts on the same stream, each between norms of its own (Gemma 4)."""

  def __init__(self, config: DecoderConfig, options: Experts, *, rngs: nnx.Rngs):
    self.dense_norm, self.post_dense_norm = norm_of(config), norm_of(config)
    self.experts_norm, self.post_experts_norm = norm_of(config), norm_of(config)
    self.dense = GatedMLP(config, rngs=rngs)
    self.sparse = ExpertMLP(config, options, rngs=rngs)

  def __call__(self, x: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """x [batch, length, embed], the residual stream -> the same shape; see `ExpertMLP`."""
    dense = self.post_dense_norm(self.dense(self.dense_norm(x)))
    sparse = self.sparse(self.experts_norm(x), counted, routed_by=x)
    return dense + self.post_experts_norm(sparse)

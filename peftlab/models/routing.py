"""Routing: which experts each token meets and with what weights; sorting; the balance of load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from peftlab import _parts
from peftlab.models.layers import Dense, unit_rms
from peftlab.models.options import Experts


class RoutingRecord(nnx.Variable):
  """What a router did since `forget`: [experts] float32, a mean over tokens; or [], how many."""


RECORDS = ('choices', 'probabilities', 'tokens')


class Router(nnx.Module):
  """Scores experts for each token and chooses the best.

  Attributes:
    proj: Dense embed -> experts.
    correction: [experts] float32, added to the scores for the choice alone, or None. It is
      balanced outside of training by gradients (https://arxiv.org/abs/2408.15664).
    scale: [embed] and expert_scale [experts], of a router beside a dense MLP; else None.
    choices, probabilities, tokens: RoutingRecord [experts], [experts] and [], where
      `record_routing` asked for them.
  """

  def __init__(self, embed: int, options: Experts, *, eps: float, dtype: Any, rngs: nnx.Rngs):
    o = options
    self.proj = Dense(
      {'embed': embed},
      {'experts': o.count},
      bias=o.router_bias,
      dtype=dtype,
      rngs=rngs,
      role='router',
    )
    zeros = jnp.zeros((o.count,), jnp.float32)
    self.correction = _parts.Constant(zeros, axes=('experts',)) if o.correction else None
    ones = (lambda size: jnp.ones((size,), dtype)) if o.beside_mlp else None
    self.scale = nnx.Param(ones(embed), axes=('embed',)) if ones else None
    self.expert_scale = nnx.Param(ones(o.count), axes=('experts',)) if ones else None
    self.choices: RoutingRecord | None = nnx.data(None)
    self.probabilities: RoutingRecord | None = nnx.data(None)
    self.tokens: RoutingRecord | None = nnx.data(None)
    self.options = options
    self.eps = eps

  def __call__(self, x: jax.Array, counted: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """x [tokens, embed] -> (weights [tokens, chosen] float32, experts [tokens, chosen] int32).

    Args:
      x: the tokens.
      counted: [tokens] bool, which of them a record is of; None: all.
    """
    if self.scale is not None:
      scale = self.scale[...] * jnp.asarray(x.shape[-1] ** -0.5, self.scale.dtype)
      x = unit_rms(x, self.eps) * scale.astype(x.dtype)[None, :]
    logits = self.proj(x).astype(jnp.float32)
    correction = None if self.correction is None else self.correction[...]
    weights, chosen = route(logits, self.options, correction=correction)
    self._record(logits, chosen, counted)
    if self.expert_scale is not None:
      weights = weights * self.expert_scale[...].astype(jnp.float32)[chosen]
    return weights, chosen

  def _record(self, logits: jax.Array, chosen: jax.Array, counted: jax.Array | None) -> None:
    """Adds the tokens that count to the means, so that microbatches give what their batch gives."""
    if self.choices is None or self.probabilities is None or self.tokens is None:
      return
    counted = jnp.ones(logits.shape[:1], bool) if counted is None else counted
    share = counted.astype(jnp.float32)
    before = self.tokens[...]
    after = before + jnp.sum(share)
    share = share / jnp.maximum(after, 1.0)
    kept = before / jnp.maximum(after, 1.0)
    hits = jnp.sum(jax.nn.one_hot(chosen, self.options.count, dtype=jnp.float32), axis=1)
    chances = jax.nn.softmax(logits, axis=-1)
    for record, found in ((self.choices, hits), (self.probabilities, chances)):
      record[...] = record[...] * kept + jnp.sum(found * share[:, None], axis=0)
    self.tokens[...] = after


def route(
  logits: jax.Array, options: Experts, *, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """A router's logits -> the weights and the numbers of the experts that each token meets.

  Args:
    logits: [tokens, experts] float32.
    options: how scores are made of them, and from which groups is chosen.
    correction: [experts], added to the scores for the choice alone.

  Returns:
    (weights [tokens, chosen] float32, experts [tokens, chosen] int32), the best first.
  """
  o = options
  if o.scoring == 'chosen':
    best, chosen = jax.lax.top_k(logits, o.chosen)
    return jax.nn.softmax(best, axis=-1), chosen
  scores = jax.nn.softmax(logits, axis=-1) if o.scoring == 'softmax' else jax.nn.sigmoid(logits)
  ranked = scores if correction is None else scores + correction[None, :]
  if o.chosen_groups < o.groups:
    ranked = jnp.where(_in_best_groups(ranked, o), ranked, -jnp.inf)
  _, chosen = jax.lax.top_k(ranked, o.chosen)
  weights = jnp.take_along_axis(scores, chosen, axis=-1)
  if o.normalize:
    # DeepSeek-V3 adds 1e-20, which float32 only notices where all scores are 0.
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
  return weights * o.scale, chosen


def _in_best_groups(ranked: jax.Array, options: Experts) -> jax.Array:
  """True for the experts of the groups whose two best scores have the largest sums."""
  o = options
  grouped = ranked.reshape(ranked.shape[0], o.groups, -1)
  best_two, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
  _, groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), o.chosen_groups)
  kept = jnp.any(groups[:, :, None] == jnp.arange(o.groups)[None, None, :], axis=1)
  return jnp.repeat(kept, o.count // o.groups, axis=-1)


def by_expert(
  run: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  weights: jax.Array,
  chosen: jax.Array,
  *,
  count: int,
  method: str,
) -> jax.Array:
  """The weighted sum of what a token's experts say: [tokens, embed].

  Args:
    run: (rows sorted by expert, group sizes [experts]) -> rows.
    x: [tokens, embed].
    weights: [tokens, chosen].
    chosen: [tokens, chosen] int32.
    count: how many experts there are.
    method: sorted, or dense: every expert runs on every token.
  """
  if method == 'dense':
    sizes = jnp.full((count,), x.shape[0], jnp.int32)
    y = run(jnp.tile(x, (count, 1)), sizes).reshape(count, *x.shape)
    hits = jax.nn.one_hot(chosen, count, dtype=jnp.float32)
    each = jnp.einsum('tk,tke->te', weights, hits).astype(x.dtype)
    return jnp.einsum('te,etd->td', each, y)
  order = jnp.argsort(chosen.reshape(-1), stable=True)
  sizes = jnp.bincount(chosen.reshape(-1), length=count).astype(jnp.int32)
  y = run(x[order // chosen.shape[-1]], sizes)
  y = y[jnp.argsort(order)].reshape(*chosen.shape, -1)
  return jnp.einsum('tk,tkd->td', weights.astype(x.dtype), y)


def record_routing(model: nnx.Module) -> nnx.Module:
  """A model on the same arrays whose routers keep what they did, for `load_balancing_loss`.

  Raises:
    ValueError: the model has no router.
  """
  model = _parts.merge(_parts.split(model))
  routers = _routers(model)
  for router in routers:
    lead = router.proj.kernel.shape[:-2]
    stack: dict[str, Any] = {'stack': tuple(range(len(lead)))} if lead else {}
    axes = ('layers',) * len(lead) + ('experts',)
    for name in RECORDS:
      own = () if name == 'tokens' else (router.options.count,)
      zeros = _zeros((*lead, *own), router.proj.kernel)
      setattr(router, name, RoutingRecord(zeros, axes=axes[: zeros.ndim], **stack))
  return model


def _zeros(shape: tuple[int, ...], kernel: nnx.Variable) -> Any:
  """An array of zeros; a shape beside a kernel that is one."""
  held = jax.tree.leaves(kernel.get_raw_value())[0]
  if not isinstance(held, jax.ShapeDtypeStruct):
    return jnp.zeros(shape, jnp.float32)
  where = held.sharding
  if isinstance(where, NamedSharding):
    where = NamedSharding(where.mesh, PartitionSpec())
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)


def forget(parts: _parts.Parts) -> _parts.Parts:
  """The parts of a model of `record_routing` with empty records."""
  model = _parts.merge(parts)
  for router in _routers(model):
    for record in _records(router):
      record[...] = jnp.zeros_like(record[...])
  return parts.replace(state=_parts.split(model).state)


def load_balancing_loss(model: nnx.Module, since: nnx.Module | None = None) -> jax.Array:
  """How unevenly the routers of a model spread the tokens of which they keep a record.

  experts * sum over experts of (choices per token) * (mean probability), both means over the tokens
  of all layers together: Switch Transformers (https://arxiv.org/abs/2101.03961, eq. 4) as
  transformers computes it. At balance it is the number of experts chosen per token. Gradients
  flow through the probabilities.

  Args:
    model: of `record_routing`, after a call.
    since: the model before the call, where only the tokens of that one are to count.

  Raises:
    ValueError: the model keeps no record.
  """
  count = _routers(model)[0].options.count
  sums = _sums(model)
  if since is not None:
    sums = [new - old for new, old in zip(sums, _sums(since), strict=True)]
  choices, chances, tokens = sums
  picked, mean = (a / jnp.maximum(tokens, 1.0) for a in (choices, chances))
  return count * jnp.sum(jax.lax.stop_gradient(picked) * mean)


def _sums(model: nnx.Module) -> list[jax.Array]:
  """The records of all routers, over the tokens of all layers: [experts], [experts] and []."""
  found = []
  for router in _routers(model):
    choices, chances, tokens = (record[...] for record in _records(router))
    weight = tokens.reshape(-1, 1)
    both = (jnp.sum(a.reshape(-1, a.shape[-1]) * weight, axis=0) for a in (choices, chances))
    found.append((*both, jnp.sum(tokens)))
  return [sum(each[1:], each[0]) for each in zip(*found, strict=True)]


def _records(router: Router) -> list[RoutingRecord]:
  records = [getattr(router, name) for name in RECORDS]
  if any(record is None for record in records):
    raise ValueError('The model keeps no record of its routing; see record_routing.')
  return records


def _routers(model: nnx.Module) -> list[Router]:
  found = [node for _, node in nnx.iter_graph(model) if isinstance(node, Router)]
  if not found:
    raise ValueError(f'{type(model).__name__} has no router.')
  return found

"""Routing: which experts each token meets and with what weights; sorting; the balance of load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _parts
from peftlab.models.layers import Dense, unit_rms
from peftlab.models.options import Experts


class RoutingRecord(nnx.Variable):
  """What a router did in its last call: [experts] float32, a mean over tokens."""


class Router(nnx.Module):
  """Scores experts for each token and chooses the best.

  Attributes:
    proj: Dense embed -> experts.
    correction: [experts] float32, added to the scores for the choice alone, or None. It is
      balanced outside of training by gradients (https://arxiv.org/abs/2408.15664).
    scale: [embed] and expert_scale [experts], of a router beside a dense MLP; else None.
    choices, probabilities: RoutingRecord [experts] where `record_routing` asked for them.
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
    self.options = options
    self.eps = eps

  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [tokens, embed] -> (weights [tokens, chosen] float32, experts [tokens, chosen] int32)."""
    if self.scale is not None:
      scale = self.scale[...] * jnp.asarray(x.shape[-1] ** -0.5, self.scale.dtype)
      x = unit_rms(x, self.eps) * scale.astype(x.dtype)[None, :]
    logits = self.proj(x).astype(jnp.float32)
    correction = None if self.correction is None else self.correction[...]
    weights, chosen = route(logits, self.options, correction=correction)
    if self.choices is not None and self.probabilities is not None:
      hits = jax.nn.one_hot(chosen, self.options.count, dtype=jnp.float32)
      self.choices[...] = jnp.mean(jnp.sum(hits, axis=1), axis=0)
      self.probabilities[...] = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=0)
    if self.expert_scale is not None:
      weights = weights * self.expert_scale[...].astype(jnp.float32)[chosen]
    return weights, chosen


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
    for name in ('choices', 'probabilities'):
      zeros = jnp.zeros((*lead, router.options.count), jnp.float32)
      setattr(router, name, RoutingRecord(zeros, axes=axes, **stack))
  return model


def load_balancing_loss(model: nnx.Module) -> jax.Array:
  """How unevenly the routers of a model spread the tokens of their last call.

  experts * sum over experts of (choices per token) * (mean probability), both means over the tokens
  of all layers together: Switch Transformers (https://arxiv.org/abs/2101.03961, eq. 4) as
  transformers computes it. At balance it is the number of experts chosen per token. Gradients
  flow through the probabilities.

  Args:
    model: of `record_routing`, after a call.

  Raises:
    ValueError: the model keeps no record.
  """
  routers = _routers(model)
  count = routers[0].options.count
  choices, probabilities = [], []
  for router in routers:
    if router.choices is None or router.probabilities is None:
      raise ValueError('The model keeps no record of its routing; see record_routing.')
    choices.append(router.choices[...].reshape(-1, count))
    probabilities.append(router.probabilities[...].reshape(-1, count))
  picked, mean = (jnp.mean(jnp.concatenate(rows), axis=0) for rows in (choices, probabilities))
  return count * jnp.sum(jax.lax.stop_gradient(picked) * mean)


def _routers(model: nnx.Module) -> list[Router]:
  found = [node for _, node in nnx.iter_graph(model) if isinstance(node, Router)]
  if not found:
    raise ValueError(f'{type(model).__name__} has no router.')
  return found

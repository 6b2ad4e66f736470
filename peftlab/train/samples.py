"""Continuations of held-out beginnings: the likeliest next token, again and again."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _parts


def continuations(
  parts: _parts.Parts, prompts: Sequence[Sequence[int]], *, tokens: int, eos_id: int
) -> list[list[int]]:
  """What the model says after each prompt, up to and without `eos_id`.

  All prompts go through the model at once, padded at their ends, with a KV cache.

  Args:
    parts: of a decoder in evaluation mode, with `init_cache(batch, length)`.
    prompts: ids, at least one each.
    tokens: how many are made.
    eos_id: what ends a text.
  """
  if not prompts or not tokens:
    return [[] for _ in prompts]
  longest = max(map(len, prompts))
  padded = np.full((len(prompts), longest), eos_id, np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  lengths = np.array([len(p) for p in prompts], np.int32)
  made = _greedy(parts.graph, tokens)(parts.adapter, parts.base, parts.state, padded, lengths)
  rows = np.asarray(made).tolist()
  return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


@functools.lru_cache(maxsize=64)
def _greedy(graph: nnx.GraphDef, tokens: int) -> Any:
  """(adapter, base, state, prompts, lengths) -> [batch, tokens] int32; one program per graph."""

  @jax.jit
  def greedy(
    adapter: Any, base: Any, state: Any, prompts: jax.Array, lengths: jax.Array
  ) -> jax.Array:
    model: Any = _parts.merge(_parts.Parts(graph, adapter, base, state))
    batch, longest = prompts.shape
    cached = model.init_cache(batch, longest + tokens)
    places = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), prompts.shape)
    hidden = cached.hidden(prompts, positions=places)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    first = _likeliest(cached.logits(last))
    whole = _parts.split(cached)

    def next_token(carry: tuple, step: jax.Array) -> tuple[tuple, jax.Array]:
      caches, token = carry
      model: Any = _parts.merge(whole.replace(state=caches))
      positions = (lengths + step)[:, None]
      logits = model.logits(model.hidden(token[:, None], positions=positions))
      return (_parts.split(model).state, _likeliest(logits)), token

    steps = jnp.arange(tokens, dtype=jnp.int32)
    _, made = jax.lax.scan(next_token, (whole.state, first), steps)
    return made.T

  return greedy


def _likeliest(logits: jax.Array) -> jax.Array:
  """[batch, 1, vocab] -> [batch] int32."""
  return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)

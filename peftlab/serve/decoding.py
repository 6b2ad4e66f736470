"""Generation with a KV cache: one compiled pass over the prompts, one compiled step per token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _parts, _specs
from peftlab.serve import arguments
from peftlab.serve import sampling as samplings
from peftlab.serve.sampling import GREEDY, Sampling

# Prompts and caches are made this much longer, at most, so that texts of similar lengths share the
# compiled programs.
_PROMPT_STEP, _CACHE_STEP = 32, 64


def generate(
  model: nnx.Module,
  prompts: Sequence[Sequence[int]],
  *,
  max_tokens: int = 64,
  sampling: Sampling = GREEDY,
  stop: Collection[int] = (),
  seed: int | Sequence[int] = 0,
) -> list[list[int]]:
  """What a model says after each prompt.

  All prompts go through the model at once; each gets what it would get alone.

  Args:
    model: a decoder with or without adapters, in any layout, on any mesh. It is not changed, and
      is used in evaluation mode.
    prompts: ids, at least one each; of any lengths.
    max_tokens: how many are made, at most.
    sampling: how they are chosen.
    stop: tokens that end a text; they are left out.
    seed: one per prompt, or that of the first: those of the others follow it (seed + 1, ...).

  Returns:
    The new tokens of each prompt.

  Raises:
    ValueError: no prompt, an empty one, a token outside the vocabulary, a text that would be longer
      than the model's max_length, or logits that are not finite.
  """
  options = dict(max_tokens=max_tokens, sampling=sampling, stop=stop, seed=seed)
  steps = stream(model, prompts, **options)
  texts: list[list[int]] = [[] for _ in prompts]
  for tokens in steps:
    for text, token in zip(texts, tokens, strict=True):
      if token is not None:
        text.append(token)
  return texts


def stream(
  model: nnx.Module,
  prompts: Sequence[Sequence[int]],
  *,
  max_tokens: int = 64,
  sampling: Sampling = GREEDY,
  stop: Collection[int] = (),
  seed: int | Sequence[int] = 0,
) -> Iterator[list[int | None]]:
  """Like `generate`, one token of every prompt at a time; None for a text that has ended."""
  arguments.check(model, prompts, max_tokens)
  arguments.check_choice(sampling, stop, model)
  keys = arguments.keys(seed, len(prompts))
  return _until_stopped(
    _tokens(model, prompts, max_tokens, sampling, keys), frozenset(map(int, stop))
  )


def _until_stopped(steps: Iterator[list[int]], stop: frozenset[int]) -> Iterator[list[int | None]]:
  ended: list[bool] = []
  for tokens in steps:
    ended = ended or [False] * len(tokens)
    ended = [was or token in stop for was, token in zip(ended, tokens, strict=True)]
    if all(ended):
      return
    yield [None if over else token for over, token in zip(ended, tokens, strict=True)]


def _tokens(
  model: Any,
  prompts: Sequence[Sequence[int]],
  max_tokens: int,
  sampling: Sampling,
  keys: jax.Array,
) -> Iterator[list[int]]:
  """The next token of every prompt, `max_tokens` times."""
  parts = _parts.evaluation_parts(model)
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  size = min(_round_up(int(lengths.max()) + max_tokens, _CACHE_STEP), model.room)
  padded = np.zeros(
    (len(prompts), min(_round_up(int(lengths.max()), _PROMPT_STEP), size)), np.int32
  )
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  mesh, numbers = _mesh(parts), sampling.numbers()
  with _specs.using(mesh):
    prefill = _prefill(parts.graph, size, sampling.kind)
    token, cached = prefill(parts.adapter, parts.base, parts.state, padded, lengths, keys, numbers)
  yield _known(token)
  state = cached.state
  leaves, tree = jax.tree.flatten(jax.tree.map(lambda a: a.sharding, state))
  decode = _decode(cached.graph, sampling.kind, tuple(leaves), tree)
  for step in range(1, max_tokens):
    with _specs.using(mesh):
      # The token that was chosen last stands at position length + step - 1.
      place, count = lengths + np.int32(step - 1), np.int32(step)
      token, state = decode(parts.adapter, parts.base, state, token, place, count, keys, numbers)
    yield _known(token)


def _known(tokens: jax.Array) -> list[int]:
  """The tokens of all rows.

  Raises:
    ValueError: the logits of a row were NaN or infinite.
  """
  found = np.asarray(tokens).tolist()
  if samplings.UNKNOWN in found:
    raise ValueError(
      f'The logits of row {found.index(samplings.UNKNOWN)} are NaN or infinite; expected numbers '
      'from which a token can be chosen. A base or an adapter with such weights gives them.'
    )
  return found


def _round_up(size: int, step: int) -> int:
  return -(-size // step) * step


def _mesh(parts: _parts.Parts) -> Any:
  """The mesh that the base lies on."""
  for leaf in jax.tree.leaves(parts.base):
    if isinstance(leaf.sharding, jax.sharding.NamedSharding):
      return leaf.sharding.mesh
  return None


@functools.lru_cache(maxsize=64)
def _prefill(graph: nnx.GraphDef, size: int, kind: str) -> Any:
  """The pass over the prompts: their next tokens, and the state of the model with its caches.

  Padding stands at place -1, that of no token: it leaves the caches as they are.
  """

  @jax.jit
  def prefill(
    adapter: Any,
    base: Any,
    state: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    numbers: dict[str, jax.Array],
  ) -> tuple[jax.Array, _parts.Parts]:
    batch, longest = prompts.shape
    decoder: Any = _parts.merge(_parts.Parts(graph, adapter, base, state))
    model = decoder.init_cache(batch, size)
    places = jnp.arange(longest, dtype=jnp.int32)[None, :]
    places = jnp.where(places < lengths[:, None], places, jnp.int32(-1))
    hidden = model.hidden(prompts, positions=places)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    token = _choose(model.logits(last), keys, jnp.int32(0), kind, numbers)
    # The caches are new, the base and the adapter are not: they are no result (law 3).
    return token, _parts.split(model).replace(adapter=None, base=None)

  return prefill


@functools.lru_cache(maxsize=64)
def _decode(graph: nnx.GraphDef, kind: str, leaves: tuple, tree: Any) -> Any:
  """One more token for every row. The state, which holds the caches, is donated."""
  shardings = jax.tree.unflatten(tree, leaves)

  def decode(
    adapter: Any,
    base: Any,
    state: Any,
    token: jax.Array,
    place: jax.Array,
    count: jax.Array,
    keys: jax.Array,
    numbers: dict[str, jax.Array],
  ) -> tuple[jax.Array, Any]:
    model: Any = _parts.merge(_parts.Parts(graph, adapter, base, state))
    logits = model.logits(model.hidden(token[:, None], positions=place[:, None]))
    return _choose(logits, keys, count, kind, numbers), _parts.split(model).state

  return jax.jit(decode, donate_argnums=2, out_shardings=(None, shardings))


def _choose(
  logits: jax.Array, keys: jax.Array, count: jax.Array, kind: str, numbers: dict[str, jax.Array]
) -> jax.Array:
  """[batch, 1, vocab] -> [batch]; every token of every row is drawn with a key of its own."""
  keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, count)
  tokens = samplings.choose(logits[:, 0], keys, kind=kind, numbers=numbers)
  return jnp.where(jnp.isfinite(jnp.max(logits[:, 0], axis=-1)), tokens, samplings.UNKNOWN)

"""The arguments of `generate`, checked: what was given, what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _rows
from peftlab.serve.sampling import Sampling


def check(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
  """Raises ValueError where a model cannot continue some prompts by so many tokens."""
  if not hasattr(model, 'init_cache'):
    raise ValueError(f'{type(model).__name__} has no init_cache; expected a decoder.')
  if not _is_whole(max_tokens) or max_tokens < 1:
    raise ValueError(f'max_tokens is {max_tokens!r}; it must be at least 1, a whole number.')
  if not _is_list(prompts):
    raise ValueError(f'prompts is {prompts!r:.60}; expected a list of lists of tokens.')
  if not len(prompts):
    raise ValueError('There is no prompt; expected one or more.')
  rows = _rows.batch_of(model)
  if rows not in (None, len(prompts)):
    raise ValueError(
      f'The model has adapters for {rows} rows; there are {len(prompts)} prompts; expected one '
      'for each row.'
    )
  vocab, longest = model.config.vocab, model.room
  for number, prompt in enumerate(prompts):
    if not _is_list(prompt):
      raise ValueError(
        f'Prompt {number} is {prompt!r:.60}; expected a list of tokens (a tokenizer makes them).'
      )
    if not len(prompt):
      raise ValueError(f'Prompt {number} has no tokens; expected one or more.')
    wrong = [token for token in prompt if not _is_whole(token) or not 0 <= token < vocab]
    if wrong:
      raise ValueError(
        f'Prompt {number} has token {wrong[0]!r:.60}; the vocabulary of the model is 0 to '
        f'{vocab - 1}.'
      )
    if len(prompt) + max_tokens > longest:
      room, taken = longest - len(prompt), model.config.max_length - longest
      virtual = f' with {taken} virtual tokens' if taken else ''
      fits = f'at most {room} fit' if room > 0 else 'a shorter prompt is needed'
      raise ValueError(
        f'Prompt {number} has {len(prompt)} tokens and max_tokens is {max_tokens}; the max_length '
        f'of the model is {model.config.max_length}{virtual}: {fits}.'
      )


def _is_list(value: Any) -> bool:
  """Whether a value has items in an order, and is neither a text nor a single array element."""
  return (
    not isinstance(value, str | bytes | Mapping)
    and hasattr(value, '__getitem__')
    and (getattr(value, 'ndim', 1) > 0)
  )


def _is_whole(value: Any) -> bool:
  """Whether a value is a whole number, also one of numpy's or of jax's."""
  if isinstance(value, bool | np.bool_):
    return False
  return isinstance(value, int) or (
    getattr(value, 'ndim', None) == 0 and jnp.issubdtype(value.dtype, jnp.integer)
  )


def check_choice(sampling: Any, stop: Any, model: Any) -> None:
  """Raises ValueError for a sampling or stop tokens of another type."""
  if not isinstance(sampling, Sampling):
    raise ValueError(f'sampling is {sampling!r:.60}; expected a serve.Sampling.')
  if isinstance(stop, str | bytes) or not hasattr(stop, '__iter__'):
    near = f', ({int(stop)},)' if _is_whole(stop) else ', () for none'
    raise ValueError(f'stop is {stop!r:.60}; expected a collection of tokens{near}.')
  wrong = [token for token in stop if not _is_whole(token)]
  if wrong:
    raise ValueError(f'stop has {wrong[0]!r:.60}; expected tokens, which are whole numbers.')
  vocab = model.config.vocab
  beyond = [token for token in stop if not 0 <= token < vocab]
  if beyond:
    raise ValueError(f'stop has {beyond[0]}; the vocabulary of the model is 0 to {vocab - 1}.')


def keys(seed: Any, count: int) -> jax.Array:
  """A key for every prompt, [count]."""
  if _is_whole(seed):
    seeds = [int(seed) + i for i in range(count)]
  else:
    seeds = list(seed) if _is_list(seed) else []
  if len(seeds) != count or not all(_is_whole(s) and 0 <= s < 2**32 for s in seeds):
    raise ValueError(
      f'seed is {seed!r:.60} for {count} prompts; expected one number of 0 to 2**32 - {count} or '
      'one for each.'
    )
  return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))

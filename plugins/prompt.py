"""Prompt tuning: virtual tokens before every text (Lester et al. 2021, arXiv:2104.08691)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import peftlab
from peftlab import initial
from peftlab.formats.peft_rows import RowsForm

INITS = ('vocab', 'normal')


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Init: the embeddings of some tokens; without any, of random ones."""

  tokens: tuple[int, ...]

  def __call__(self, key, shape, dtype, weight):
    if not self.tokens:
      return weight[jax.random.randint(key, shape[:1], 0, weight.shape[0])].astype(dtype)
    if max(self.tokens) >= weight.shape[0]:
      raise ValueError(
        f'A prompt starts from the token {max(self.tokens)}; there are {weight.shape[0]}.'
      )
    repeated = (self.tokens * -(-shape[0] // len(self.tokens)))[: shape[0]]
    return weight[jnp.asarray(repeated)].astype(dtype)


@functools.cache
def ids_of(text, tokenizer):
  """The tokens of a text."""
  from peftlab.data.tokenizers import load_tokenizer

  return tuple(load_tokenizer(tokenizer).encode(text))


@peftlab.register_adapter('prompt')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(peftlab.Adapter):
  """[p; x] for the embedded text x. Trainable: count * embed.

  Attributes:
    count: virtual tokens.
    init: vocab (the embeddings of random tokens) or normal (of variance 1).
    tokens: start as the embeddings of these, cut off or repeated to `count`.
    text: likewise, of this text.
    tokenizer: what splits the text, in the words of `load_tokenizer`.
  """

  point = 'inputs'
  identity_at_start = False
  mergeable = False
  mixed_batch = False
  peft_rows = RowsForm(
    types=('PROMPT_TUNING', 'P_TUNING'),
    keys={
      'prompt_tuning_init': 'RANDOM',
      'prompt_tuning_init_text': None,
      'tokenizer_kwargs': None,
      'tokenizer_name_or_path': None,
    },
    # PEFT keeps of p-tuning's encoder what it gives, which is a prompt.
    neutral=(
      'encoder_dropout',
      'encoder_hidden_size',
      'encoder_num_layers',
      'encoder_reparameterization_type',
    ),
  )

  count: int = 16
  init: str = initial('vocab')
  tokens: tuple[int, ...] = initial(())
  text: str = initial('')
  tokenizer: str = initial('')

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'tokens', tuple(self.tokens))
    if self.count < 1:
      raise ValueError(f'Prompt count is {self.count}; it must be at least 1.')
    if self.init not in INITS:
      raise ValueError(f'No prompt init {self.init!r}. Inits: {", ".join(INITS)}.')
    if min(self.tokens, default=0) < 0:
      raise ValueError(f'Prompt tokens are {self.tokens}; expected 0 and above.')
    if self.text and (self.tokens or not self.tokenizer):
      raise ValueError('A prompt with a text needs a tokenizer, and has no tokens besides.')

  def slots(self):
    tokens = ids_of(self.text, self.tokenizer) if self.text else self.tokens
    if self.init == 'normal' and not tokens:
      return {'rows': peftlab.Slot(dims='count out', init=jax.nn.initializers.normal(1.0))}
    return {'rows': peftlab.Slot(dims='count out', init=Tokens(tokens), needs_weight=True)}

  def apply(self, x, base, p):
    del base
    return peftlab.before(p.rows, x)

"""A tiny decoder, tiny text and a tiny experiment: a whole run in seconds."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab.data.batches import held_out_batches
from peftlab.data.rows import Rows
from peftlab.models.decoder import Decoder, layer_constants
from peftlab.plugins.lora import LoRA
from peftlab.train import config, opt_state, step
from peftlab.train.text import Text
from tests.models.small import SMALL

DECODER = dataclasses.replace(SMALL, max_length=64)
VOCAB = DECODER.vocab


class Tokenizer:
  """Tokens are numbers."""

  eos_id = 0
  bos_id = None

  def decode(self, ids):
    return ' '.join(map(str, ids))


@functools.cache
def base_model(seed: int = 0) -> Decoder:
  """One for all tests: nobody may write to it. Its weights are numpy's: nothing is compiled."""
  parts = peftlab.split(nnx.eval_shape(lambda: Decoder(DECODER, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(seed)

  def weights(shape):
    return jnp.asarray(rng.normal(size=shape.shape, scale=0.4).astype(np.float32))

  base = jax.tree.map(weights, parts.base)
  base['layers']['attn']['rope_frequencies'] = layer_constants(DECODER)['rope_frequencies']
  return peftlab.merge(parts.replace(base=base))


def batch(seed: int = 0, rows: int = 4, length: int = 8) -> dict[str, jax.Array]:
  rng = np.random.default_rng(seed)
  ids = rng.integers(1, VOCAB, (rows, length + 1)).astype(np.int32)
  mask = (rng.random((rows, length)) < 0.7).astype(np.float32)
  places = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
  arrays = {
    'tokens': ids[:, :-1],
    'targets': ids[:, 1:],
    'loss_mask': mask,
    'positions': places,
    'segment_ids': np.ones((rows, length), np.int32),
  }
  return {name: jnp.asarray(array) for name, array in arrays.items()}


@functools.cache
def text(rows: int = 10, length: int = 8) -> Text:
  """A cycle of tokens, which is learned at once."""
  stream = (np.arange(rows * length) % 7 + 1).astype(np.int32)
  pieces = [(i, i * length, (i + 1) * length, 0) for i in range(rows)]
  made = Rows(
    length=length,
    pad_id=0,
    stream=stream,
    predicted=np.ones(stream.shape, bool),
    pieces=np.array(pieces, np.int64),
    source={'corpus': 'cycle'},
  )
  held = held_out_batches(made, size=2, count=4)
  return Text(tokenizer=Tokenizer(), rows=made, held_out=held, prompts=[[1, 2, 3], [5]])


def experiment(**train) -> config.Experiment:
  options = {'steps': 6, 'learning_rate': 0.05, 'checkpoint_every': 2, 'sample_tokens': 4} | train
  return config.Experiment(
    name='tiny',
    adapter=LoRA(rank=2, dropout=0.25),
    data=config.DataConfig(length=8, batch=2),
    train=config.TrainConfig(**options),
  )


@dataclasses.dataclass
class Trainee:
  """An adapter ready for its first step."""

  parts: peftlab.Parts
  state: opt_state.OptState
  step: step.Step

  def run(self, *batches):
    """The metrics of a step on each batch."""
    found = []
    for one in batches:
      adapter, self.state, metrics = self.step(self.parts.adapter, self.state, self.parts.base, one)
      self.parts = self.parts.replace(adapter=adapter)
      found.append({name: float(value) for name, value in metrics.items()})
    return found


def trainee(
  adapter=None, *, model=None, learning_rate=0.01, weight_decay=0.0, name='default', **options
) -> Trainee:
  adapter = LoRA(rank=2) if adapter is None else adapter
  model, _ = peftlab.attach(model or base_model(), adapter, name=name)
  parts = opt_state.training_parts(model)
  chosen = opt_state.StepOptions(**options)
  state = opt_state.init_opt_state(
    parts, chosen, learning_rate=learning_rate, weight_decay=weight_decay
  )
  return Trainee(parts, state, step.step_for(parts, state, chosen))

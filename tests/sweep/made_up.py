"""A root of made-up trials, with rows, records and items, as a sweep would leave them."""

import json
import pathlib

import numpy as np

from peftlab.sweep import items, ledger, rows, space, trial, trials
from tests.train import tiny

TYPES = ('lora', 'dora', 'ia3')
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)


def loss_of(setting, step=100):
  """Lower with rank and with the middle rate; `ia3` is the worst."""
  kind = {'lora': 0.0, 'dora': -0.02, 'ia3': 0.25}[setting['adapter']]
  rate = abs(np.log10(setting['train.learning_rate'] / 3e-3)) * 0.2
  rank = -0.05 * np.log2(setting.get('adapter.rank', 2) / 2)
  end = 2.0 + kind + rate + rank
  return end + 1.5 * np.exp(-step / 30)


def settings():
  for kind in TYPES:
    for rank in (2, 8) if kind != 'ia3' else (None,):
      for rate in RATES:
        size = {} if rank is None else {'adapter.rank': rank}
        yield {'adapter': kind, **size, 'train.learning_rate': rate}


def write(root: pathlib.Path) -> list[trials.Trial]:
  """Writes the root; one trial diverged, one failed, one is missing."""
  base = tiny.experiment(samples=0, sample_tokens=0)
  made = trials.expand(base, space.with_seeds(list(settings()), first=0, count=len(SEEDS)))
  ledger.add(root, made, {t.id: ['train', '--config=x.py', f'--workdir=r/{t.id}'] for t in made})
  noise = np.random.default_rng(0)
  rows_of = np.random.default_rng(1).normal(0, 0.3, 40)
  for i, one in enumerate(made):
    if i == len(made) - 1:
      continue
    status = {4: 'diverged', len(made) - 2: 'failed'}.get(i, 'ok')
    _write(root / one.id, one, status, noise.normal(0, 0.01), rows_of)
  return made


def _write(folder, one, status, noise, rows_of):
  folder.mkdir()
  if status == 'failed':
    error = {'status': 'failed', 'error': 'ValueError: adapter.rank is <8>.', 'config': {}}
    rows.write(folder, {'id': one.id, **error})
    return
  lines = []
  for step in range(0, 101, 5):
    value = loss_of(one.setting, step) + noise
    if status == 'diverged' and step > 40:
      value = 40.0
    kind = [('train', value + 0.05)] + [('eval', value)] * (step % 50 == 0)
    lines += [json.dumps({'kind': k, 'step': step, 'loss': v, 'seconds': step}) for k, v in kind]
  (folder / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  end = loss_of(one.setting) + noise
  tokens = np.full(40, 16, np.float32)
  items.write(folder, ((end + rows_of + 0.02 * noise) * 16).astype(np.float32), tokens)
  size = 4 * 1000 * one.setting.get('adapter.rank', 1)
  row = {
    **trial.about(one.experiment, command=['peftlab', 'train']),
    'status': status,
    'steps': 100,
    'held_out_before': 3.5,
    'held_out_after': end if status == 'ok' else None,
    'train_loss': end,
    'skipped': 0,
    'trainable': size // 4,
    'bytes': {'base': 10**6, 'adapter': size, 'optimizer': 2 * size},
    'tokens_per_second': 9000.0 - 300 * TYPES.index(one.setting['adapter']),
    'packed': 4,
    'seconds': 12.5,
    'second': {'corpus': 'gsm8k', 'before': 4.0, 'after': 4.0 + 0.3 * (3.5 - end)},
  }
  rows.write(folder, row)

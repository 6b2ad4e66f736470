"""`peftlab train --dry_run`: what a run would adapt, from shapes alone."""

import re

import jax
import pytest

from peftlab import cli
from peftlab.formats import gguf

pytestmark = pytest.mark.usefixtures('usual_ranks')

NAME = '--config=glassllm_lora'


def test_it_shows_every_layer_with_its_adapter_and_makes_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def refuse(*args, **kwargs):
    raise AssertionError(f'a weight is read: {args} {kwargs}')

  monkeypatch.setattr(gguf.GGUFFile, '__getitem__', refuse)
  before = len(jax.live_arrays())
  flags = ['--config.adapters=mlp=dora(rank=3)', '--config.patterns=attn.q:rank=2']
  assert cli.main(['train', NAME, '--dry_run', '--config.adapter.rank=5', *flags]) == 0
  assert len(jax.live_arrays()) == before
  assert list(tmp_path.iterdir()) == []
  shown = capsys.readouterr().out
  rows = {line.split()[0]: line for line in shown.splitlines() if re.match(r'layers\.', line)}
  assert {name.split('.', 1)[1] for name in rows} == {
    *('attn.k', 'attn.o', 'attn.q', 'attn.v', 'mlp.down', 'mlp.gate', 'mlp.up')
  }
  total = 0
  for name, line in rows.items():
    words = line.split()
    dora = '.mlp.' in name
    assert words[-1] == ('DoRA' if dora else 'LoRA')
    rank = 3 if dora else 2 if name.endswith('.q') else 5
    layers, ins, outs = (int(words[i]) for i in (1, 2, 4))
    assert f'a[{layers}, {ins}, {rank}]' in line
    total += layers * (rank * (ins + outs) + outs * dora)
  assert f': {total:,} trainable, ' in shown
  for what in ('base', 'adapter', 'gradient', 'optimizer', 'together'):
    assert re.search(rf'^{what} +[\d.]+ (B|KiB|MiB|GiB)', shown, re.MULTILINE)


@pytest.mark.parametrize('where', ('attn.q', 'mlp'))
def test_the_memory_is_that_of_the_numbers(where, capsys):
  assert cli.main(['train', NAME, '--dry_run', f'--config.where={where}']) == 0
  shown = capsys.readouterr().out
  count = re.search(r'([\d,]+) trainable', shown)
  assert count
  size = re.search(r'^gradient +([\d.]+) (B|KiB|MiB)', shown, re.MULTILINE)
  assert size
  unit = {'B': 1, 'KiB': 2**10, 'MiB': 2**20}[size[2]]
  assert float(size[1]) * unit == pytest.approx(4 * int(count[1].replace(',', '')), rel=0.02)

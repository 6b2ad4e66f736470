"""`peftlab train --dry_run`: what a run would adapt, from shapes alone."""

import gc
import re
import warnings

import jax
import pytest

from peftlab import cli
from peftlab.formats import gguf
from peftlab.models import load
from peftlab.train import devices
from peftlab.train.config import MeshConfig

pytestmark = pytest.mark.usefixtures('usual_ranks')

NAME = '--config=glassllm_lora'


def test_it_shows_every_layer_with_its_adapter_and_makes_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def refuse(*args, **kwargs):
    raise AssertionError(f'a weight is read: {args} {kwargs}')

  monkeypatch.setattr(gguf.GGUFFile, '__getitem__', refuse)
  gc.collect()  # of what the tests before this one have left
  before = len(jax.live_arrays())
  flags = ['--config.adapters=mlp=dora(rank=3)', '--config.patterns=attn.q:rank=2']
  assert cli.main(['train', NAME, '--dry_run', '--config.adapter.rank=5', *flags]) == 0
  gc.collect()
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


REPEAT = "the 2 devices along it repeat one another's work"
# The flags of a mesh -> what is said of it.
IDLE = {
  'expert': (
    ('--config.mesh.expert=2', '--config.mesh.fsdp=2'),
    f'mesh.expert is 2, but it cuts neither the batch nor any array of the model: {REPEAT}. Expect',
  ),
  'stage': (
    ('--config.mesh.stage=2',),
    f'mesh.stage is 2, but base.applier is scan, under which {REPEAT}. Expected 1, or base.applier',
  ),
  'a pipeline': (('--config.mesh.stage=2', '--config.base.applier=pipeline'), ''),
  'used': (('--config.mesh.fsdp=2', '--config.mesh.tensor=2', '--config.mesh.data=2'), ''),
}


@pytest.mark.parametrize('name', IDLE)
def test_a_mesh_axis_that_does_nothing_is_told(name, capsys):
  options, line = IDLE[name]
  with warnings.catch_warnings():
    warnings.simplefilter('always')
    assert cli.main(['train', NAME, '--dry_run', *options]) == 0
  told = capsys.readouterr().err
  assert told.count('peftlab: warning: ') == told.count('\n') == bool(line)
  assert line in told


@pytest.mark.parametrize('options', ((), ('--config.base.quant=int8', '--config.base.tile=auto')))
def test_an_axis_that_does_not_divide_is_refused_as_loading_refuses_it(options, capsys):
  mesh = ('--config.mesh.tensor=8', '--config.mesh.indivisible=error')
  assert cli.main(['train', NAME, '--dry_run', *mesh, *options]) == 2
  told = capsys.readouterr().err
  # glassllm has 2 key heads.
  assert "layers.attn.k.kernel dimension 2 (2) by 'tensor' (8; would: 1, 2)" in told or options
  quant = {'quant': 'int8', 'tile': 'auto'} if options else {}
  with pytest.raises(ValueError, match="indivisible is 'error'") as error:
    load.load_model(
      'package:glassllm/en', devices.make_mesh(MeshConfig(tensor=8)), indivisible='error', **quant
    )
  assert told == f'peftlab: {error.value}\n'


def test_a_text_that_is_not_there_is_refused_as_a_run_does(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  for source in ('nope.jsonl', 'folder/nope.txt', 'chitchta'):
    told = []
    for more in (('--dry_run',), ('--workdir=run',)):
      assert cli.main(['train', NAME, f'--config.data.corpus={source}', *more]) == 2
      told.append(capsys.readouterr().err)
    assert told[0] == told[1]
    assert source in told[0]
  (tmp_path / 'text.jsonl').write_text('')
  assert cli.main(['train', NAME, '--config.data.corpus=text.jsonl', '--dry_run']) == 0

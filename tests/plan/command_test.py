"""The whole command, with CPU devices in the place of those of a TPU: no libtpu is needed."""

import re

import jax
import pytest

import peftlab
from peftlab import _parts, cli
from peftlab.plan import program, shapes, topology
from peftlab.plan.chips import CHIPS
from peftlab.sweep import program as packs
from peftlab.train import opt_state
from tests.plan import tpu
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture
def on_cpu(monkeypatch):
  monkeypatch.setattr(topology, 'devices', lambda name: (CHIPS['v6e'], jax.devices()))


@pytest.fixture
def file(tmp_path):
  source = tpu.folder(tmp_path / 'base', 2)
  path = tmp_path / 'small.py'
  path.write_text(
    'from tests.plan import tpu\n'
    f'def get_config():\n  return tpu.experiment({source!r})\n'
    "def sweep_rank():\n  yield from ({'adapter.rank': r} for r in (4, 8))\n"
    "def sweep_rate():\n  yield from ({'train.learning_rate': r} for r in (0.1, 0.2))\n"
  )
  return str(path)


@pytest.mark.usefixtures('on_cpu')
def test_a_plan_is_printed(file, capsys):
  flags = ['--config.mesh.fsdp=2', '--config.data.length=16']
  assert cli.main(['plan', f'--config={file}', '--topology=v6e:2x4', *flags]) == 0
  text = capsys.readouterr().out
  assert '2 of 8 chips (fsdp 2)' in text
  assert 'it fits' in text
  assert '2 of 8 devices are used: --config.mesh.fsdp=-1 takes all' in text
  assert 'all-gather' in text


@pytest.mark.usefixtures('on_cpu')
def test_a_sweep_is_planned_trial_by_trial(file, capsys):
  flags = ['--sweep=rank,rate', '--config.data.length=16']
  assert cli.main(['plan', f'--config={file}', '--topology=v6e:2x4', *flags]) == 0
  text = capsys.readouterr().out
  assert '4 trials, 2 programs; all fit v6e:2x4' in text
  assert text.count('rank=8 learning_rate=0.1') >= 1


@pytest.mark.usefixtures('on_cpu')
def test_packs_are_compared(file, capsys):
  flags = ['--pack=1,3', '--config.data.length=8', '--config.data.batch=1']
  assert cli.main(['plan', f'--config={file}', '--topology=v6e:2x4', *flags]) == 0
  text = capsys.readouterr().out
  assert 'trained numbers, 3 trials in one program' in text
  *_, head, one, three = text.splitlines()
  assert re.sub(' +', ' ', head) == ('trials memory share a step a trial-step roofline of it fits')
  assert (one.split()[0], three.split()[0]) == ('1', '3')


def test_a_topology_is_needed(file, capsys):
  assert cli.main(['plan', f'--config={file}']) == 2
  assert '--topology is missing; expected CHIP:SHAPE' in capsys.readouterr().err


def test_a_pack_is_the_program_that_a_sweep_compiles():
  experiment = tiny.experiment()
  device = jax.devices()[0]
  base, _ = shapes.placed(tiny.base_model(), device)
  planned = program.compile_pack(shapes.shapes(experiment, base, device), 2)
  model, _ = peftlab.attach(tiny.base_model(), experiment.adapter, name=experiment.name)
  parts = opt_state.training_parts(model)
  options = opt_state.StepOptions.of(experiment.train)
  template = packs.Template(
    parts=parts,
    evaluated=_parts.evaluation_parts(model).replace(adapter={}),
    state=opt_state.init_opt_state(parts, options, learning_rate=0.1),
    variants=(options,),
    lengths={},
  )
  made = packs.Program(template, 2, tiny.text().rows.batch([0, 1]))
  assert planned.memory.total == made.nbytes

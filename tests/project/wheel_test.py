"""A wheel puts only peftlab into site-packages, with plugins and experiments in it, and trains."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tools import imports

# Attaches LoRA to a layer and takes one gradient step on the adapter alone.
TRAIN_ONE_STEP = """
import pathlib
from flax import nnx
import jax
import jax.numpy as jnp

import peftlab
import peftlab.experiments
import peftlab.third_party
from peftlab.plugins import lora


class Model(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(4, 8, rngs=rngs)
    self.out = nnx.Linear(8, 2, rngs=rngs)

  def __call__(self, x):
    return self.out(jax.nn.relu(self.hidden(x)))


for module in (peftlab, peftlab.experiments, peftlab.third_party, lora):
  print(pathlib.Path(module.__file__).resolve())
model = Model(nnx.Rngs(0))
before = jax.tree.leaves(peftlab.split(model).base)
model, _ = peftlab.attach(model, lora.LoRA(rank=2, alpha=2.0), rngs=nnx.Rngs(1))
parts = peftlab.split(model)
x = jnp.ones((3, 4))


def loss(adapter):
  return jnp.mean(jnp.square(peftlab.merge(parts.replace(adapter=adapter))(x) - 1.0))


first, gradients = jax.jit(jax.value_and_grad(loss))(parts.adapter)
adapter = jax.tree.map(
  lambda leaf, gradient, moves: leaf - 0.1 * gradient if moves else leaf,
  parts.adapter, gradients, peftlab.trainable(parts))
assert loss(adapter) < first, (loss(adapter), first)
assert [id(a) for a in jax.tree.leaves(parts.base)] == [id(b) for b in before], 'base was copied'
print('trained')
"""


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> pathlib.Path:
  """A folder with the wheel of this checkout installed, and nothing else."""
  top = tmp_path_factory.mktemp('wheel')
  source = top / 'source'
  for folder in ('peftlab', 'plugins', 'experiments', 'third_party'):
    shutil.copytree(imports.ROOT / folder, source / folder, symlinks=True)
  for file in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(imports.ROOT / file, source / file)
  pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--quiet']
  options = ['--no-deps', '--no-index', '--no-build-isolation']
  subprocess.run([*pip, 'wheel', *options, '--wheel-dir', top, source], check=True)
  (wheel,) = top.glob('*.whl')
  target = top / 'site'
  subprocess.run([*pip, 'install', *options, '--target', target, wheel], check=True)
  return target


def test_the_wheel_holds_only_peftlab(site):
  ours, information = sorted(path.name for path in site.iterdir() if path.name != 'bin')
  assert ours == 'peftlab'
  assert information.startswith('peftlab-')
  assert information.endswith('.dist-info')


def test_the_wheel_holds_every_module_once(site):
  installed = {path.relative_to(site) for path in site.rglob('*.py')}
  assert installed == set(imports.python_files('peftlab'))
  assert not list(site.rglob('bazel_stubs'))


def test_the_wheel_trains_one_step_from_elsewhere(site, tmp_path):
  variables = {**os.environ, 'PYTHONPATH': str(site), 'JAX_PLATFORMS': 'cpu'}
  result = subprocess.run(
    [sys.executable, '-c', TRAIN_ONE_STEP],
    cwd=tmp_path,
    env=variables,
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  *files, last = result.stdout.split()
  assert last == 'trained'
  assert all(pathlib.Path(file).is_relative_to(site.resolve()) for file in files)


def test_the_command_is_installed(site):
  assert (site / 'bin' / 'peftlab').exists()

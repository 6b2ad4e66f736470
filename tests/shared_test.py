"""Slots that the whole model has once: one Variable, its sizes, gradient, file and place."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peftlab
from peftlab import _parts, appliers, testing
from peftlab.plugins.vblora import VBLoRA
from peftlab.plugins.vera import VeRA
from peftlab.testing import case as cases

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(autouse=True, scope='module')
def usual_ranks():
  with jax.numpy_rank_promotion('allow'):
    yield


BANK = VBLoRA(rank=2, vectors=6, length=4)


def attached(adapter=BANK, **options):
  return peftlab.attach(testing.StackModel(**options), adapter)


def test_every_layer_has_the_same_variable_of_the_largest_size():
  model, report = attached(VeRA(rank=3))
  held = {id(layer.adapters[0].shared_a) for layer in (model.layers.up, model.layers.down)}
  assert len(held) == 1
  assert model.layers.up.adapters[0].shared_a.shape == (24, 3)  # of in: 16 and 24
  assert model.layers.up.adapters[0].shared_b.shape == (3, 24)
  assert report.nbytes == sum(a.nbytes for a in jax.tree.leaves(peftlab.split(model).adapter))


def test_a_layer_sees_the_leading_part():
  model, _ = attached(VeRA(rank=3))
  p = model.layers.up.adapters[0].values(jnp.float32, {'in': 16, 'out': 24})
  assert (p.shared_a.shape, p.shared_b.shape) == ((16, 3), (3, 24))
  np.testing.assert_array_equal(p.shared_a, model.layers.down.adapters[0].shared_a[...][:16])


def test_it_has_no_layer_axis_and_its_gradient_is_the_sum_over_layers():
  model, _ = attached()
  parts = cases.randomized(peftlab.split(model))
  path = next(p for p in _parts.flat(parts.adapter) if p[-1] == 'bank')
  x = cases.stack_input()
  scan = cases.outputs_and_gradients(parts, x)
  loop = peftlab.merge(parts)
  loop.applier = appliers.Sequential()
  sequential = cases.outputs_and_gradients(peftlab.split(loop), x)
  assert scan[2][path].shape == (6, 4)
  cases.assert_close(scan[0], sequential[0], 'outputs')
  cases.assert_close(scan[2][path], sequential[2][path], 'gradient of the bank')
  alone = _with_banks_of_their_own(parts, x)
  cases.assert_close(scan[2][path], alone, 'against the sum of the gradients of copies')


def _with_banks_of_their_own(parts, x):
  """The gradients of a bank per layer and site, summed."""
  kept = VBLoRA.slots

  def slots(self):
    found = kept(self)
    return found | {'bank': dataclasses.replace(found['bank'], shared=False)}

  VBLoRA.slots = slots
  try:
    model, _ = attached()
    own = peftlab.split(model)
    leaves, shared = {}, _parts.flat(parts.adapter)
    bank = next(a for p, a in shared.items() if p[-1] == 'bank')
    for path in _parts.flat(own.adapter):
      leaves[path] = jnp.stack([bank, bank]) if path[-1] == 'bank' else shared[path]
    own = own.replace(adapter=_parts.nest(leaves))
    gradients = jax.jit(jax.grad(lambda a: cases._loss(a, own, x)[0]))(own.adapter)
  finally:
    VBLoRA.slots = kept
  return sum(g.sum(0) for p, g in _parts.flat(gradients).items() if p[-1] == 'bank')


class Pair(nnx.Module):
  """Two linear layers, the second wider."""

  def __init__(self):
    self.narrow = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    self.wide = nnx.Linear(8, 24, rngs=nnx.Rngs(1))


def test_layers_attached_later_share_it_and_more_than_it_has_is_refused():
  first, _ = peftlab.attach(Pair(), VeRA(rank=3), where='wide')
  both, _ = peftlab.attach(first, VeRA(rank=3), where='narrow')
  assert both.narrow.adapters[0].shared_b is both.wide.adapters[0].shared_b
  small, _ = peftlab.attach(Pair(), VeRA(rank=3), where='narrow')
  with pytest.raises(ValueError, match=r"^The shared slot 'shared_b' of VeRA has shape \(3, 8\)"):
    peftlab.attach(small, VeRA(rank=3), where='wide')


def test_other_names_share_nothing():
  model, _ = peftlab.attach(Pair(), VeRA(rank=3), name='first')
  model, _ = peftlab.attach(model, VeRA(rank=3), name='second', rngs=1)
  first, second = model.wide.adapters
  assert first.shared_a is not second.shared_a
  assert peftlab.detach(model, 'first').wide.adapters[0].shared_a.shape == (8, 3)


def test_the_file_holds_it_once(tmp_path):
  from safetensors.numpy import load_file

  model, _ = attached()
  peftlab.save_adapter(model, tmp_path / 'adapter')
  keys = load_file(tmp_path / 'adapter' / 'adapter_model.safetensors')
  assert [k for k in keys if 'bank' in k] == ['base_model.vblora_vector_bank']
  back = peftlab.load_adapter(testing.ListModel(), tmp_path / 'adapter')
  held = {id(layer.up.adapters[0].bank) for layer in back.layers}
  assert len(held) == 1


def test_on_a_mesh_it_lies_whole_on_every_device():
  mesh = testing.meshes()['fsdp4_tensor2']
  model, _ = peftlab._specs.place(testing.StackModel(), mesh)
  placed, _ = peftlab.attach(model, BANK)
  bank = placed.layers.up.adapters[0].bank[...]
  assert bank.sharding.is_fully_replicated
  assert len(bank.sharding.device_set) == 8


def test_it_cannot_start_from_one_kernel():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Wrong(peftlab.Adapter):
    def slots(self):
      return {'w': peftlab.Slot(dims='in out', shared=True, needs_weight=True)}

    def apply(self, x, base, p):
      return base(x) + x @ p.w

  with pytest.raises(ValueError, match=r'^Wrong shares slot .w., so it cannot start'):
    peftlab.attach(Pair(), Wrong())

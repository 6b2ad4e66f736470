"""What a type reads in training beside `apply` counts too: rates, penalties, new values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peftlab import Adapter, Slot
from peftlab.plugins.adalora import AdaLoRA
from peftlab.plugins.lora import LoRA
from peftlab.plugins.lora_plus import LoRAPlus
from peftlab.sweep import compatibility, numbers
from peftlab.train.opt_state import StepOptions

pytestmark = pytest.mark.usefixtures('quick_compiles')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pulled(Adapter):
  """A shift that is pulled to a number by the loss, and clipped to another one after a step."""

  to: float = 0.0
  most: float = 1.0

  def slots(self):
    return {'shift': Slot(dims='out')}

  def apply(self, x, base, p):
    return base(x) + p.shift

  def penalty(self, p):
    return jnp.sum((p.shift - self.to) ** 2)

  def after_step(self, kernels, *, step, steps):
    del step, steps
    return [{'shift': jnp.clip(k.values['shift'], -self.most, self.most)} for k in kernels]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switched(Pulled):
  """One whose number is a choice of the program."""

  def penalty(self, p):
    return jnp.sum(p.shift) if self.to else None


def tried(adapter, carrier, *names):
  return compatibility.check(adapter, carrier, names, StepOptions())


@pytest.mark.parametrize(
  ('adapter', 'carrier', 'names', 'reason'),
  (
    (Pulled(to=0.5, most=0.1), Pulled(to=0.0, most=0.2), ('to', 'most'), ''),
    (AdaLoRA(beta1=0.5), AdaLoRA(), ('beta1',), ''),
    # Not given as arrays, so that the carrier's numbers would be taken for the trial's.
    (Pulled(to=0.5), Pulled(to=0.0), (), 'has another gradient'),
    (Pulled(most=0.01), Pulled(), (), 'has another value after a step'),
    (Switched(to=0.5), Switched(to=1.0), ('to',), 'reads to as a Python number'),
    (AdaLoRA(orthogonal=0.1), AdaLoRA(), ('orthogonal',), 'reads orthogonal as a Python number'),
    (LoRAPlus(ratio=2.0), LoRAPlus(), ('ratio',), 'another rate of its slot b'),
    (AdaLoRA(rank=4), AdaLoRA(), (), 'with rank 4 inside a larger one has another'),
    (LoRA(rank=4, dropout=0.1), LoRA(dropout=0.3), ('dropout',), ''),
  ),
  ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_type_reads_in_training_decides(adapter, carrier, names, reason):
  found = tried(adapter, carrier, *names)
  assert reason in found
  assert bool(found) == bool(reason), found


@pytest.mark.parametrize('number', (0.1, 0.5, 1e-4, 3.5, -2.0))
@pytest.mark.parametrize('dtype', ('float32', 'bfloat16', 'float16'))
def test_a_number_in_a_slot_does_what_a_python_number_does(number, dtype):
  x = jnp.arange(1, 5, dtype=dtype)

  @jax.jit
  def both(bits):
    read = numbers.read(bits)
    return (x * read, 1.0 - read), (x * number, 1.0 - number)

  (ours, rest), (theirs, whole) = both(jnp.asarray(numbers.held(number)))
  assert ours.dtype == theirs.dtype == dtype
  np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
  # In float32 whatever the dtype of the layer: 1 - 0.1 is 0.9, not the 0.8984 of bfloat16.
  np.testing.assert_array_equal(np.float32(rest), np.float32(whole))


def test_no_number_loses_digits_and_no_share_its_rest():
  shares = np.random.default_rng(0).random(2000) / 2
  for number in (*shares, 1e-30, 1e-8, 0.0, 1.0, 100.0, -1e-4):
    held = numbers.value(number)
    np.testing.assert_allclose(held, number, rtol=2e-7)
    assert np.float32(1) - held == np.float32(1 - number)

"""(IA)^3: a learned factor for each output or input (Liu et al. 2022, arXiv:2205.05638)."""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import PeftForm, Tensor


def _is_named(names: Any, path: str) -> bool:
  """Whether PEFT's feedforward_modules name a layer: a regex of it, or ends of its path."""
  if isinstance(names, str):
    return re.fullmatch(names, path) is not None
  return any(path == name or path.endswith(f'.{name}') for name in names or ())


def _fields(config: Mapping[str, Any], path: str, shapes: Mapping[str, tuple]) -> dict[str, Any]:
  del shapes
  return {'feedforward': _is_named(config.get('feedforward_modules'), path)}


def _keys(
  told: Mapping[str, dict], targets: list[str], shapes: Mapping[str, Mapping]
) -> dict[str, Any]:
  """feedforward_modules; PEFT wants its names to be among the targets."""
  del shapes
  named = {
    t: {f['feedforward'] for path, f in told.items() if _is_named([t], path)} for t in targets
  }
  if all(len(kinds) == 1 for kinds in named.values()):
    return {'feedforward_modules': [t for t, kinds in named.items() if True in kinds]}
  inputs = sorted(path for path, fields in told.items() if fields['feedforward'])
  return {'target_modules': sorted(told), 'feedforward_modules': inputs}


@peftlab.register_adapter('ia3')
@dataclasses.dataclass(frozen=True, kw_only=True)
class IA3(peftlab.Adapter):
  """y = l * (x W + b), or (l * x) W + b. Trainable: out per kernel, or in (section 3.3).

  Of a convolution's inputs a channel has one factor, whatever its place in the window.

  Attributes:
    feedforward: whether the inputs are multiplied (the second layer of an MLP) instead of the
      outputs (keys and values).
  """

  additive = False
  peft = PeftForm(
    type='IA3',
    tensors=(
      Tensor('factor', 'ia3_l', 'out -> out 1', when={'feedforward': False}, on=('linear',)),
      Tensor('factor', 'ia3_l', 'in -> 1 in', when={'feedforward': True}, on=('linear',)),
    ),
    neutral=('feedforward_modules', 'init_ia3_weights'),
    at=_fields,
    more=_keys,
  )

  feedforward: bool = False

  def slots(self):
    dims = 'channels' if self.feedforward else 'out'
    return {'factor': peftlab.Slot(dims=dims, init=jax.nn.initializers.ones)}

  def apply(self, x, base, p):
    if self.feedforward:
      return base(x * self._of_rows(p, base.shape[0]))
    return base(x) * p.factor + base.bias() * (p.factor - 1)

  def fuse(self, w, p):
    return self._of_rows(p, w.shape[0])[:, None] * w if self.feedforward else w * p.factor

  def fuse_bias(self, b, p):
    return b if self.feedforward else b * p.factor

  def _of_rows(self, p, rows):
    return jnp.repeat(p.factor, rows // p.factor.shape[0])

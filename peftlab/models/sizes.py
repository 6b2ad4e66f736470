"""Named sizes: the config and the shapes of a published model, without its weights."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from flax import nnx

from peftlab import _parts, _registry, appliers
from peftlab.models import decoder, hugging_face, load
from peftlab.models.config import DTYPES, DecoderConfig, check_choice
from peftlab.models.families import Family

_ = load.BUILT_IN  # importing it registers the families


def names() -> tuple[str, ...]:
  """'deepseek_v3', 'gemma2-2b', ..., 'smollm2-360m'."""
  return tuple(sorted(_families()))


def _families() -> dict[str, Family]:
  every = map(_registry.families.get, _registry.families.names())
  return {name: family for family in every for name in family.sizes}


def config(name: str, *, dtype: str = 'float32') -> DecoderConfig:
  """The config of a named size, read as the config.json of its folder would be.

  Raises:
    ValueError: no such size, or no such dtype.
  """
  check_choice('dtype', dtype, DTYPES)
  families = _families()
  if name not in families:
    near = _registry.did_you_mean(name, families)
    raise ValueError(f'No size {name!r}{near or "."} Sizes: {", ".join(sorted(families))}.')
  family = families[name]
  source: Any = hugging_face.Described(pathlib.Path(name), family.sizes[name])
  return dataclasses.replace(family.formats['hf'].config(source), dtype=dtype)


def outline(
  name: str, *, applier: str | appliers.Applier = 'scan', dtype: str = 'bfloat16'
) -> decoder.Decoder:
  """A model of a named size whose arrays are shapes: nothing is allocated.

  Args:
    name: of `names()`.
    applier: runs the layers: a registered name, or an applier.
    dtype: of weights and activations.

  Raises:
    ValueError: no such size, applier or dtype.
  """
  options, chosen = config(name, dtype=dtype), appliers.get_applier(applier)
  return nnx.eval_shape(lambda: decoder.Decoder(options, rngs=nnx.Rngs(0), applier=chosen))


def parameters(model: nnx.Module) -> int:
  """How many numbers of a model can be trained: its weights without constants and adapters."""
  return sum(
    math.prod(variable.shape)
    for variable in _parts.variables(model).values()
    if isinstance(variable, nnx.Param)
    and not isinstance(variable, (_parts.Constant, nnx.LoRAParam))
  )

"""The base of an experiment as shapes: a named size, a config.json, or a file of weights."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from flax import nnx

from peftlab import _registry, quant
from peftlab.formats import files
from peftlab.models import decoder, hugging_face, load, sizes
from peftlab.models.families import Family
from peftlab.train.config import BaseConfig

FILE = 'file'  # base.quant: the codes of a GGUF file as they are


def outline(base: BaseConfig) -> decoder.Decoder:
  """The model of a base whose arrays are shapes; no weight is read, and none need be there.

  Args:
    base: its source is a named size ('llama3.1-8b'), a folder with a config.json, or whatever a run
      takes (a GGUF file, 'package:NAME').

  Raises:
    ValueError: no such size, file, folder or family.
  """
  applier = base.make_applier()
  source = pathlib.Path(base.source)
  if base.quant == FILE:  # only the file knows
    return load.outline(base.source, applier=applier, dtype=base.dtype, **base.quantization)
  if base.source in sizes.names():
    return sizes.outline(base.source, applier=applier, dtype=base.dtype)
  if (source / 'config.json').is_file():
    return _from_config(source, applier=applier, dtype=base.dtype)
  if not source.exists() and not base.source.startswith('package:'):
    raise ValueError(_unknown(base.source))
  return load.outline(base.source, applier=applier, dtype=base.dtype)


def quantized(model: nnx.Module, base: BaseConfig, *, indivisible: str = 'drop') -> nnx.Module:
  """Shapes that are on their place, with the weights held as the base says, as a run loads them.

  A tile of 'auto' depends on the mesh: so they are placed first, and quantized then.

  Raises:
    ValueError: no such quantizer, or a tile does not divide.
  """
  if base.quant in ('', FILE):
    return model
  options: dict[str, Any] = {'where': base.quant_where, 'exclude': base.quant_exclude}
  options['indivisible'] = indivisible
  return quant.quantize(model, base.quant, tile=base.tile or None, **options)[0]


def _from_config(folder: pathlib.Path, *, applier: Any, dtype: str) -> decoder.Decoder:
  values = files.read_json(folder / 'config.json')
  kind, known = values.get('model_type'), _families()
  if kind not in known:
    near = _registry.did_you_mean(str(kind), known)
    raise ValueError(
      f"'{folder / 'config.json'}' has model_type {kind!r}{near or '.'} Supported: "
      f'{", ".join(sorted(known))}.'
    )
  source: Any = hugging_face.Described(folder, values)
  config = dataclasses.replace(known[kind].formats['hf'].config(source), dtype=dtype)
  return nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0), applier=applier))


def _families() -> dict[str, Family]:
  every = map(_registry.families.get, _registry.families.names())
  return {name: family for family in every for name in family.model_types}


def _unknown(source: str) -> str:
  near = _registry.did_you_mean(source, sizes.names())
  packages = ', '.join(f'package:{name}' for name in load.PACKAGES)
  return (
    f'No base {source!r}{near or "."} Expected a size ({", ".join(sizes.names())}), a folder with '
    f'config.json, a GGUF file, or one of: {packages}.'
  )

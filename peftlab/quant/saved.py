"""A quantized base on disk: its codes and scales as they are, for any mesh."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from flax import nnx
import jax

from peftlab import _padded, _parts, _processes, _registry, _sites, _specs
from peftlab.quant import convert, quantized, quantizer

FORMAT = 1
ABOUT = 'about.json'
ARRAYS = 'arrays'


def told(chosen: quantizer.Quantizer) -> str:
  """A quantizer in the words of `get_quantizer`: 'nf4(tile=64, double=true, ...)'."""
  fields = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen)}
  shown = (f'{n}={str(v).lower() if isinstance(v, bool) else v}' for n, v in fields.items())
  return f'{chosen.name}({", ".join(shown)})'


def save(model: nnx.Module, folder: str | os.PathLike[str], *, source: str = '') -> None:
  """Writes the base of a model, quantized weights as codes and scales.

  Args:
    model: adapters on it are left out.
    folder: is made; it is complete as soon as its about.json is there.
    source: what the base was made from, which `load` compares.

  Raises:
    ValueError: there is something in the folder.
  """
  import orbax.checkpoint as ocp

  path = pathlib.Path(folder).resolve()
  _processes.by_first(lambda: _make_folder(path, os.fspath(folder)))
  arrays = _named(_padded.cut_tree(_parts.split(model).base))
  with ocp.StandardCheckpointer() as orbax:
    orbax.save(path / ARRAYS, arrays)
  about = {
    'format': FORMAT,
    'source': source,
    'arrays': {name: _told(array) for name, array in arrays.items()},
    'quantizers': {
      site.name: told(value.form.quantizer)
      for site in _sites.sites(model)
      if isinstance(value := site.weight.get_raw_value(), quantized.Quantized)
    },
  }
  _processes.by_first(lambda: _write_about(path, about))


def _make_folder(path: pathlib.Path, folder: str) -> None:
  if path.exists() and any(path.iterdir()):
    raise ValueError(f"'{folder}' is not empty; a base is saved into a folder of its own.")
  path.mkdir(parents=True, exist_ok=True)


def _write_about(path: pathlib.Path, about: dict[str, Any]) -> None:
  unfinished = path / (ABOUT + '.tmp')
  unfinished.write_text(json.dumps(about, indent=1))
  unfinished.replace(path / ABOUT)


def is_saved(folder: str | os.PathLike[str]) -> bool:
  """Whether a whole base is in a folder."""
  return (pathlib.Path(folder) / ABOUT).is_file()


def load(
  outline: nnx.Module,
  folder: str | os.PathLike[str],
  *,
  mesh: jax.sharding.Mesh | None = None,
  rules: _specs.Rules | None = None,
  source: str = '',
  indivisible: str = 'drop',
) -> Any:
  """The model of `save`, bit by bit, on any mesh.

  Args:
    outline: the model as shapes, before it was quantized.
    folder: of `save`.
    mesh: where the arrays go.
    rules: logical axes -> mesh axes; None: those in force.
    source: what the base should have been made from.
    indivisible: what is done where a mesh axis does not divide an array, see `load_model`.

  Raises:
    ValueError: no base there, or one of another model or source; an axis does not divide and that
      is an error.
  """
  import orbax.checkpoint as ocp

  path = pathlib.Path(folder).resolve()
  if not is_saved(path):
    raise ValueError(f"'{folder}' holds no saved base: it has no {ABOUT}.")
  about = json.loads((path / ABOUT).read_text())
  if about.get('format') != FORMAT or about['source'] != source:
    raise ValueError(
      f"'{folder}' holds a base of {about.get('source')!r} (format {about.get('format')}); "
      f'expected {source!r} (format {FORMAT}).'
    )
  held = about['quantizers']
  plans = convert.plan(
    outline,
    lambda site: quantizer.get_quantizer(held[site.name]) if site.name in held else None,
    where=tuple(held) or 'all-linear',
  )
  model = convert.carry_out(outline, plans)[0]
  parts = _parts.split(model)
  wanted = _named(parts.base)
  for name in dict.fromkeys([*about['arrays'], *wanted]):
    there = about['arrays'].get(name, 'nothing')
    here = _told(wanted[name]) if name in wanted else 'nothing'
    if there != here:
      near = _registry.did_you_mean(name, wanted) if name not in wanted else ''
      raise ValueError(f"'{folder}' holds {there} for {name}; expected {here}{near or '.'}")
  if mesh is not None and indivisible == 'error':
    _padded.refuse(_specs.shardings(model, mesh, rules)[1])
  placed = _placed(model, wanted, mesh, rules)
  with ocp.StandardCheckpointer() as orbax:
    arrays = orbax.restore(path / ARRAYS, placed)
  tree = jax.tree.structure(parts.base)
  base = jax.tree.unflatten(tree, [arrays[name] for name in wanted])
  restored = _parts.merge(parts.replace(base=base))
  if mesh is None or indivisible != 'pad':
    return restored
  return _padded.place(restored, mesh, rules, indivisible=indivisible)[0]


def _named(base: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in jax.tree.leaves_with_path(base)
  }


def _told(array: Any) -> str:
  return f'{array.dtype}[{",".join(map(str, array.shape))}]'


def _placed(
  model: nnx.Module, wanted: dict[str, Any], mesh: Any, rules: Any
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes that say where each array goes."""
  if mesh is None:
    where: Any = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for n, a in wanted.items()}
  found, _ = _specs.shardings(model, mesh, rules)
  base = _parts.flat(_parts.split(model).base)
  named = _named(_parts.nest({path: found[path] for path in base}))
  return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named[n]) for n, a in wanted.items()}

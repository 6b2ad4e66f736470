"""Properties on meshes of 8 devices, with widths that the axes divide and widths they do not."""

from __future__ import annotations

import functools
from typing import Any

import chex
from flax import nnx

from peftlab import _attach, _parts, _specs
from peftlab.testing import case as cases
from peftlab.testing import devices, models


@functools.cache
def _placed(mesh: str, sizes: tuple[int, int], points: bool) -> nnx.Module:
  return _specs.place(cases.base_model(sizes, points=points), devices.meshes()[mesh])[0]


def _attached(case: cases.Case, model: nnx.Module) -> tuple[_parts.Parts, _parts.Parts]:
  """(first values, random values) on a model."""
  fresh = _parts.split(_attach.attach(model, case.adapter, where=case.where)[0])
  return fresh, cases.randomized(fresh)


def same_on_every_mesh(case: cases.Case) -> None:
  """Meshes (8, 1), (4, 2), (2, 4): first values, outputs and gradients are those of one device."""
  sizes, single, x = models.EVEN, case.fresh, cases.stack_input()
  y, _, gradients = case.results
  if case.thorough:
    sizes = (models.HALF[0] * cases.times(case.adapter), models.HALF[1])
    single, random = _attached(case, case.base_model(sizes))
    x = cases.stack_input(sizes[0])
    y, _, gradients = cases.outputs_and_gradients(random, x)
  for mesh in _meshes(case):
    fresh, parts = _attached(case, _placed(mesh, sizes, bool(case.point)))
    _compare(_parts.flat(fresh.adapter), _parts.flat(single.adapter), f'first values on {mesh}')
    got = cases.outputs_and_gradients(parts, x)
    cases.assert_close(got[0], y, f'outputs on {mesh}')
    _compare(got[2], gradients, f'gradients on {mesh}', tolerance=5e-5)


def _meshes(case: cases.Case) -> dict[str, Any]:
  every = devices.meshes()
  return every if case.thorough else {name: every[name] for name in list(every)[1:2]}


def _compare(
  actual: dict[tuple, Any], expected: dict[tuple, Any], what: str, *, tolerance: float = 1e-5
) -> None:
  for path, array in actual.items():
    name = f'{what}: {_parts.path_name(path)}'
    cases.assert_close(array, expected[path], name, tolerance=tolerance)


def arrays_are_sharded_like_their_kernel(case: cases.Case) -> None:
  """Arrays with one of the kernel's dimensions lie over all 8 devices, in equal pieces."""
  slots = case.adapter.slots()
  words = {n: s.dims.split() for n, s in slots.items() if not s.shared}
  cut = [n for n, w in words.items() if sum(d in ('in', 'out') for d in w) == 1]
  if not cut:
    raise cases.NotApplicable('no slot has exactly one dimension of the kernel')
  for mesh_name, mesh in _meshes(case).items():
    model, report = _attach.attach(
      _placed(mesh_name, models.EVEN, bool(case.point)), case.adapter, where=case.where
    )
    dropped = [d for d in report.dropped if d.path.rpartition('.')[2] in cut]
    assert not dropped, f'on {mesh_name} it dropped {dropped}'
    adapter = _parts.flat(_parts.split(model).adapter)
    chex.assert_tree_is_sharded(list(adapter.values()), devices=mesh.devices.flat)
    for path, array in adapter.items():
      if path[-1] in cut:
        held = _parts.nbytes(array)
        name = f'{_parts.path_name(path)} on {mesh_name}'
        own = array.size * _parts.bits(array.dtype) // 8
        assert held == own, f'{name}: {held} bytes on 8 devices for {own} of its own'


CLAIMS = (same_on_every_mesh, arrays_are_sharded_like_their_kernel)

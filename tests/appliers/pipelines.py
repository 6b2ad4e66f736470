"""What the tests of the pipeline share: a stack on a mesh with stages, and its arrays per layer."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import peftlab
from peftlab import _parts, _specs, _stack, testing
from peftlab.appliers import Pipeline
from peftlab.plugins.lora import LoRA
from peftlab.testing import case as cases

X = jax.random.normal(jax.random.key(1), (8, 16))


def mesh(stage: int, fsdp: int = 1, tensor: int = 1, kind: AxisType = AxisType.Auto) -> Any:
  """A mesh of some of the 8 devices."""
  shape = (stage, fsdp, tensor)
  devices = jax.devices()[: stage * fsdp * tensor]
  return jax.make_mesh(shape, ('stage', 'fsdp', 'tensor'), axis_types=(kind,) * 3, devices=devices)


def model(length: int, **options: Any) -> testing.StackModel:
  """Blocks whose activations stay small through 16 of them."""
  made = testing.StackModel(length=length, **options)
  parts = peftlab.split(made.layers)
  made.layers = peftlab.merge(parts.replace(base=jax.tree.map(lambda a: a * 0.4, parts.base)))
  return made


def adapted(length: int, **options: Any) -> _parts.Parts:
  """The same with a LoRA of random values, under scan."""
  return cases.randomized(
    peftlab.split(peftlab.attach(model(length, **options), LoRA(rank=2, alpha=1))[0])
  )


def laid_out(parts: _parts.Parts, pipeline: Pipeline, on: Any, *, replicated: bool = False):
  """The parts under a pipeline, on a mesh."""
  made: Any = peftlab.merge(parts)
  made.layers, made.applier = pipeline.lay_out(made.layers, on), pipeline
  if not replicated:
    return peftlab.split(_specs.place(made, on)[0])
  return jax.device_put(peftlab.split(made), NamedSharding(on, P()))


def per_layer(parts: _parts.Parts, arrays: dict[tuple, Any]) -> dict[tuple, np.ndarray]:
  """{path: array of a stack} -> the same in layer order; asserts that empty places have zeros."""
  made: Any = peftlab.merge(parts)
  stacked = _stack.stacked(peftlab.split(made.layers), 0)
  found = {}
  for path, array in arrays.items():
    axis: Any = stacked.axes['adapter'][path[1:]]
    array = np.moveaxis(np.asarray(array), axis, 0)
    empty = [place for place, number in enumerate(stacked.order) if number < 0]
    assert not array[empty].any()
    found[path] = np.moveaxis(array[stacked.places], 0, axis)
  return found


def assert_same(parts: _parts.Parts, expected: tuple, x: jax.Array, on: Any) -> None:
  """Asserts outputs, loss and gradients on a mesh, to 1e-5 in float32."""
  with jax.set_mesh(on):
    y, loss, gradients = cases.outputs_and_gradients(parts, jax.device_put(x, on_rows(on)))
  cases.assert_close(y, expected[0], 'outputs')
  cases.assert_close(loss, expected[1], 'loss')
  gradients = per_layer(parts, gradients)
  assert gradients.keys() == expected[2].keys()
  for path, gradient in gradients.items():
    cases.assert_close(gradient, expected[2][path], _parts.path_name(path))


def on_rows(on: Any) -> NamedSharding:
  """Rows over fsdp."""
  return NamedSharding(on, P('fsdp'))

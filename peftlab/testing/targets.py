"""Properties of an adapter on every type of layer, against the layer written as a matmul."""

from __future__ import annotations

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _attach, _kernel, _parts
from peftlab.testing import case as cases
from peftlab.testing import models, probe

LAYERS = ('conv', 'linear', 'general', 'einsum', 'head')
INPUTS = {
  'conv': (2, 6, 15),
  'linear': (4, 9),
  'general': (4, 21),
  'einsum': (4, 3, 5),
  'head': (4, 15),
}


def _rows(name: str, x: jax.Array, ins: int) -> jax.Array:
  """A layer's input as [tokens, in], so that the layer is a matmul."""
  if name == 'embed':
    return jax.nn.one_hot(x.reshape(-1), ins)
  if name == 'conv':
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    windows = jnp.stack([padded[:, i : i + x.shape[1]] for i in range(3)], axis=-1)
    return windows.reshape(-1, 3 * x.shape[-1])
  return x.reshape(x.shape[0], -1)


def _inputs(names: tuple[str, ...], times: int) -> dict[str, jax.Array]:
  key = jax.random.key(5)
  found = {
    n: jax.random.normal(key, (*INPUTS[n][:-1], INPUTS[n][-1] * times))
    for n in names
    if n != 'embed'
  }
  if 'embed' in names:
    found['embed'] = jax.random.randint(key, (2, 4), 0, models.ZooModel.vocab)
  return found


@functools.partial(jax.jit, static_argnames='adapter')
def _both(
  parts: _parts.Parts, inputs: dict[str, jax.Array], adapter: _adapter.Adapter
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """{layer: (its output with the adapter, apply on its matrix + bias)}, each [tokens, out]."""
  model = _parts.merge(parts)
  found = {}
  for name, x in inputs.items():
    layer = getattr(model, name)
    kind = _kernel.layer_type(layer)
    assert kind is not None
    words = kind.layout(layer).words
    weight = getattr(layer, kind.weight)[...]
    matrix = _kernel.as_matrix(weight, words)
    values = layer.adapters[0].values(jnp.float32, _kernel.kernel_sizes(words, weight.shape))
    bias = layer.bias[...].reshape(-1) if kind.bias else jnp.zeros(matrix.shape[1:])
    y = adapter.apply(_rows(name, x, matrix.shape[0]), probe.PlainBase(matrix, bias), values)
    found[name] = (layer(x).reshape(y.shape), y + bias)
  return found


def works_on_every_layer_type(case: cases.Case) -> None:
  """Linear, LinearGeneral, Einsum, Conv of odd widths: as apply on the layer as a matmul."""
  case.needs_weights()
  times = cases.times(case.adapter)
  layers = LAYERS if case.thorough else ('conv', 'einsum')
  if not case.adapter.conv:
    try:
      _attach.attach(cases.zoo_model(times), case.adapter, where='conv')
    except ValueError:
      layers = tuple(name for name in layers if name != 'conv')
    else:
      raise AssertionError('conv is False, but it was attached to a convolution')
  model, report = _attach.attach(cases.zoo_model(times), case.adapter, where=layers)
  assert sorted(row.path for row in report.rows) == sorted(layers), f'adapted {report.rows}'
  parts = cases.randomized(_parts.split(model))
  for name, (got, expected) in _both(parts, _inputs(layers, times), case.adapter).items():
    cases.assert_close(got, expected, f'{name} against apply on its matrix')


def embeddings_as_claimed(case: cases.Case) -> None:
  """On an embedding apply works as on one-hot rows, or embeddings = False and it is refused."""
  case.needs_weights()
  times = cases.times(case.adapter)

  def attach() -> tuple[nnx.Module, object]:
    return _attach.attach(cases.zoo_model(times), case.adapter, where='embed')

  if not case.adapter.embeddings:
    try:
      attach()
    except ValueError:
      return
    raise AssertionError('embeddings is False, but it was attached to one')
  parts = cases.randomized(_parts.split(attach()[0]))
  try:
    got, expected = _both(parts, _inputs(('embed',), times), case.adapter)['embed']
  except (TypeError, ValueError) as error:
    raise AssertionError(
      f'on an embedding x can only be used as `x @ m`, `x * v`, `x + v`, base(x) and '
      f'base.dropout(x); where that is too little, say embeddings = False. {error}'
    ) from error
  cases.assert_close(got, expected, 'a lookup against apply on one-hot rows')


CLAIMS = (works_on_every_layer_type, embeddings_as_claimed)

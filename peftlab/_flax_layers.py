"""The layers of flax that can be adapted, and how each uses its weight."""

from __future__ import annotations

import string

from flax import nnx

from peftlab import _kernel


def _linear(layer: nnx.Linear) -> _kernel.Layout:
  words = ('in', 'out')
  return _kernel.Layout(
    words=words,
    shape=(layer.in_features, layer.out_features),
    equation=lambda ndim: _kernel.trailing(words, ndim),
  )


def _linear_general(layer: nnx.LinearGeneral) -> _kernel.Layout:
  if layer.batch_axis:
    raise ValueError(f'LinearGeneral with batch_axis {dict(layer.batch_axis)} is not a kernel.')
  ins, outs = len(layer.in_features), len(layer.out_features)

  def equation(ndim: int) -> tuple[str, str, str]:
    kernel = string.ascii_letters[: ins + outs]
    free = iter(string.ascii_letters[ins + outs :])
    axes = sorted(a % ndim for a in layer.axis)
    x = [kernel[axes.index(i)] if i in axes else next(free) for i in range(ndim)]
    rest = ''.join(c for c in x if c not in kernel)
    return ''.join(x), kernel, rest + kernel[ins:]

  return _kernel.Layout(
    words=('in',) * ins + ('out',) * outs,
    shape=(*layer.in_features, *layer.out_features),
    equation=equation,
  )


def _einsum(layer: nnx.Einsum) -> _kernel.Layout:
  if layer.einsum_str is None:
    raise ValueError('An nnx.Einsum without an equation of its own cannot be adapted.')
  x, rest = layer.einsum_str.split(',')
  kernel, y = rest.split('->')
  batch = [c for c in kernel if c in x and c in y]
  lost = [c for c in kernel if c not in x and c not in y]
  if batch or lost or '...' in kernel:
    raise ValueError(
      f'The einsum {layer.einsum_str!r} is not a plain contraction: each letter of its weight must '
      'be in exactly one of input and output.'
    )

  def equation(ndim: int) -> tuple[str, str, str]:
    named = x.replace('...', '')
    unused = (c for c in string.ascii_letters if c not in x + kernel + y)
    dots = ''.join(next(unused) for _ in range(ndim - len(named)))
    return x.replace('...', dots), kernel, y.replace('...', dots)

  words = tuple('in' if c in x else 'out' for c in kernel)
  return _kernel.Layout(words=words, shape=tuple(layer.kernel_shape), equation=equation)


def _embed(layer: nnx.Embed) -> _kernel.Layout:
  return _kernel.Layout(words=('in', 'out'), shape=(layer.num_embeddings, layer.features))


def _conv(layer: nnx.Conv) -> _kernel.Layout:
  if layer.feature_group_count != 1 or layer.mask is not None:
    raise ValueError('A convolution with feature groups or a mask is not one kernel [in, out].')
  words = (_kernel.TAP,) * len(layer.kernel_size) + ('in', 'out')
  return _kernel.Layout(words=words, shape=tuple(layer.kernel_shape))


_kernel.register_layer(nnx.Linear, _linear, check=False)
_kernel.register_layer(nnx.LinearGeneral, _linear_general, check=False)
_kernel.register_layer(nnx.Einsum, _einsum, check=False)
_kernel.register_layer(nnx.Embed, _embed, weight='embedding', bias=None, linear=False, check=False)
_kernel.register_layer(nnx.Conv, _conv, check=False)
_kernel.register_norm(nnx.LayerNorm, bias='bias')
_kernel.register_norm(nnx.RMSNorm)

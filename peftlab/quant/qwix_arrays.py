"""qwix's QArray, taken and given: for code that uses both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from peftlab import _registry
from peftlab.quant import quantized, quantizer
from peftlab.quant.codebooks import NormalFloat4
from peftlab.quant.integers import Scaled
from peftlab.quant.nibbles import Nibbles


def from_qwix(array: Any) -> quantized.Quantized:
  """A QArray of a kernel [in, out] with one scale per tile of inputs and output.

  Raises:
    ValueError: of another rank, with zero points, or of a type that no quantizer has.
  """
  codes, scale = array.qvalue, array.scale
  if codes.ndim != 2 or scale.shape[1] != codes.shape[1] or array.zero_point is not None:
    raise ValueError(
      f'The QArray has codes {codes.shape} and scales {scale.shape}; expected a kernel [in, out] '
      'with scales [tiles, out] and no zero points.'
    )
  tile = codes.shape[0] // scale.shape[0]
  chosen: Any = _chosen(array.qtype, tile, str(scale.dtype))
  chosen = chosen.settled(jax.default_backend(), tile)
  form = quantized.Form(
    quantizer=chosen, words=('in', 'out'), shape=codes.shape, dtype=str(scale.dtype)
  )
  tiles = codes.reshape(scale.shape[0], tile, codes.shape[1])
  if isinstance(chosen, Nibbles):
    tiles = chosen.hold(tiles.astype(jnp.int8) & 15)
  return quantized.Quantized({'codes': tiles, 'scales': scale}, form)


def _chosen(qtype: Any, tile: int, scale_dtype: str) -> quantizer.Quantizer:
  if qtype == 'nf4':
    return NormalFloat4(tile=tile, double=False, scale_dtype=scale_dtype)
  known: dict[str, Any] = {}
  for name in _registry.quantizers.names():
    cls = _registry.quantizers.get(name)
    if issubclass(cls, Scaled):
      known[cls.codes_dtype] = cls
  name = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
  if name not in known:
    near = _registry.did_you_mean(name, known)
    raise ValueError(f'No quantizer holds {name!r}{near or "."} Types: nf4, {", ".join(known)}.')
  return known[name](tile=tile, scale_dtype=scale_dtype)


def to_qwix(value: quantized.Quantized) -> Any:
  """The QArray of one layer's kernel [in, out]; inverse of `from_qwix`.

  Raises:
    ValueError: the quantizer has no form in qwix.
  """
  import qwix

  form = value.form
  shape = (form.inputs, -1)
  scales = value.form.quantizer.expand(value.arrays).get('scales')
  codes = value.arrays['codes']
  if isinstance(form.quantizer, NormalFloat4):
    unsigned: jax.Array = form.quantizer.unsigned(codes).astype(jnp.uint4)
    return qwix.QArray(unsigned.reshape(shape), _flat(scales), None, 'nf4')
  if isinstance(form.quantizer, Nibbles) and isinstance(form.quantizer, Scaled):
    codes = form.quantizer.signed_numbers(codes, jnp.int8).astype(jnp.int4)
  if isinstance(form.quantizer, Scaled):
    return qwix.QArray(codes.reshape(shape), _flat(scales), None, codes.dtype)
  raise ValueError(f'{form.quantizer.name} has no form in qwix.')


def _flat(scales: Any) -> jax.Array:
  return scales.reshape(scales.shape[0], -1)

"""Properties of what a type says it works on: each claim is tried, a false one fails either way."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _adapter, _attach, _kernel, _parts
from peftlab.models import experts
from peftlab.testing import case as cases
from peftlab.testing import probe

UNEVEN = (13, 11)  # nothing divides them
ROUTING = (3, 0, 2)  # rows of three experts


class _Layer(nnx.Module):
  """One linear layer."""

  def __init__(self, sizes: tuple[int, int]):
    normal = nnx.initializers.normal(0.5)
    self.linear = nnx.Linear(*sizes, bias_init=normal, rngs=nnx.Rngs(0))

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [batch, in] -> [batch, out]."""
    return self.linear(x)


def _refused(call: Any) -> str:
  """The message of the ValueError that a call raises, or ''."""
  try:
    call()
  except ValueError as error:
    return str(error)
  return ''


def divides_as_claimed(case: cases.Case) -> None:
  """A quotient in dims ('in/block') that does not come out even is refused; without, all fits."""
  case.needs_weights()
  model = nnx.eval_shape(lambda: _Layer(UNEVEN))
  words = _adapter.divided(case.adapter)
  message = _refused(lambda: _attach.attach(model, case.adapter, where=case.where))
  if not words:
    assert not message, f'no slot has a quotient, but {UNEVEN} is refused: {message}'
    return
  parts = {word.partition('/')[2] for word in words}
  assert message, f'{", ".join(words)} cannot come out even for {UNEVEN}, but it was attached'
  assert any(part in message for part in parts), f'the message names none of {parts}: {message}'


def rows_can_differ_as_claimed(case: cases.Case) -> None:
  """Rows with arrays of their own give what each gives alone, or mixed_batch is False."""
  if not case.adapter.mixed_batch:
    raise cases.NotApplicable('mixed_batch is False')
  first, second = case.kernel, probe.probe(case.adapter, random=False)
  slots = case.adapter.slots()
  own = [
    {n: probe.as_seen(a, jnp.float32) for n, a in p.arrays.items() if not slots[n].shared}
    for p in (first, second)
  ]
  same = {n: a for n, a in first.arrays.items() if slots[n].shared}
  base = probe.PlainBase(first.weight, first.bias)

  def one(x: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    return case.adapter.apply(x, base, _adapter.Values(arrays | same))

  stacked = jax.tree.map(lambda *each: jnp.stack(each), *own)
  y = jax.jit(jax.vmap(one))(jnp.stack([first.x, first.x]), stacked)
  for index, arrays in enumerate(own):
    cases.assert_close(y[index], one(first.x, arrays), f'row {index} against its adapter alone')


def experts_as_claimed(case: cases.Case) -> None:
  """Each of a stack of experts has arrays of its own and meets its own rows, or it is refused."""
  case.needs_weights()
  width = 8
  layer = experts.ExpertDense(
    len(ROUTING), {'embed': width}, {'mlp': width}, rngs=nnx.Rngs(0), bias=True
  )
  if not case.adapter.experts:
    refused = _refused(lambda: _attach.attach(layer, case.adapter, where=case.where))
    assert refused, 'experts is False, but it was attached to experts'
    return
  parts = cases.randomized(_parts.split(_attach.attach(layer, case.adapter, where=case.where)[0]))
  x = cases.stack_input(width)[: sum(ROUTING)]
  y = _routed(parts, x, jnp.asarray(ROUTING))
  held: Any = _parts.merge(parts)
  start = 0
  for expert, count in enumerate(ROUTING):
    if not count:
      continue
    rows = slice(start, start + count)
    expected = _one_expert(case, held, expert, x[rows])
    cases.assert_close(y[rows], expected, f'expert {expert} against apply on its kernel')
    start += count


@jax.jit
def _routed(parts: _parts.Parts, x: jax.Array, sizes: jax.Array) -> jax.Array:
  return _parts.merge(parts)(x, sizes)


def _one_expert(case: cases.Case, layer: Any, expert: int, x: jax.Array) -> jax.Array:
  attached = layer.adapters[0]
  arrays = {}
  for name, slot in attached.slots().items():
    array = getattr(attached, name)[...]
    if not slot.aside:
      arrays[name] = probe.as_seen(array if slot.shared else array[expert], jnp.float32)
  kind = _kernel.layer_type(layer)
  assert kind is not None
  words = kind.layout(layer).words
  matrix = _kernel.as_matrix(layer.kernel[...], words)[expert]
  bias = layer.bias[...][expert]
  base = probe.PlainBase(matrix, bias)
  return case.adapter.apply(x, base, _adapter.Values(arrays)) + bias.reshape(1, -1)


def quantized_as_claimed(case: cases.Case) -> None:
  """On int8 and nf4 codes it gives what it gives on their numbers, or quantized_base is False."""
  from peftlab import quant

  case.needs_weights()
  model = _Layer((16, 16))
  for name in ('int8', 'nf4') if case.thorough else ('nf4',):
    coded, _ = quant.quantize(model, name, tile=8)
    if not case.adapter.quantized_base:
      refused = _refused(lambda coded=coded: _attach.attach(coded, case.adapter, where=case.where))
      assert refused, 'quantized_base is False, but it was attached to codes'
      continue
    parts = [
      cases.randomized(_parts.split(_attach.attach(base, case.adapter, where=case.where)[0]))
      for base in (coded, quant.dequantize(coded))
    ]
    x = cases.stack_input(16)
    y, expected = (cases.forward(p, x) for p in parts)
    cases.assert_close(y, expected, f'{name} codes against their numbers', tolerance=1e-4)


def asks_for_tokens_as_claimed(case: cases.Case) -> None:
  """apply asks for the tokens of the batch, or reads_batch = False and it does not."""
  case.needs_weights()
  base = case.kernel.base()
  case.adapter.apply(case.kernel.x, base, _adapter.Values(case.kernel.arrays))
  said = case.adapter.reads_batch
  assert base.asked == said, (
    f'reads_batch is {said}, but apply {"asks" if base.asked else "does not"}'
  )


CLAIMS = (
  asks_for_tokens_as_claimed,
  divides_as_claimed,
  rows_can_differ_as_claimed,
  experts_as_claimed,
  quantized_as_claimed,
)

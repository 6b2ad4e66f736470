"""Sees the weight of any layer type as a kernel [in, out], and its input as [tokens, in]."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
import contextlib
import dataclasses
import math
import string
from typing import Any

from einops import rearrange
from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from peftlab import _groups, _packed

EXPERT = 'expert'
TAP = 'tap'
INPUTS = ('in', TAP)  # the dimensions of a weight that are contracted, as a kernel has them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How one layer uses its weight.

  Attributes:
    words: 'in' or 'out' per dimension of the weight, or 'tap', a place in a convolution's window:
      rows of its kernel are (channel, tap). One may be 'expert': the layer then is called with rows
      sorted by expert and how many each has, `layer(x [rows, *in], sizes [experts])`.
    shape: sizes of those dimensions without stack axes; None where the layer does not tell.
    equation: letters of (input, weight, output), one per dimension; None for a lookup or a
      convolution, whose input has no dimension to contract.
  """

  words: tuple[str, ...]
  shape: tuple[int, ...] | None = None
  equation: Callable[[int], tuple[str, str, str]] | None = None

  def of_one_expert(self) -> Layout:
    """The layout of the weight of one expert."""
    keep = [i for i, word in enumerate(self.words) if word != EXPERT]
    shape = None if self.shape is None else tuple(self.shape[i] for i in keep)
    return dataclasses.replace(self, words=tuple(self.words[i] for i in keep), shape=shape)


@dataclasses.dataclass(frozen=True)
class LayerType:
  """What is registered for a layer class: names of weight and bias, and its layout.

  A point has no weight; what stands here for one is that of the layer behind which it lies.
  """

  weight: str
  bias: str | None
  layout: Callable[[Any], Layout]
  linear: bool
  check: bool
  norm: bool = False
  point: bool = False


_LAYERS: dict[type, LayerType] = {}


def register_layer(
  cls: type,
  layout: str | Callable[[Any], Layout] = 'in out',
  *,
  weight: str = 'kernel',
  bias: str | None = 'bias',
  linear: bool = True,
  check: bool = True,
) -> None:
  """Lets `attach` adapt layers of a class: `peftlab.register_layer(MyLinear, weight='w')`.

  Args:
    cls: an nnx.Module whose `__call__(x, ...)` multiplies x by one weight.
    layout: a word per dimension of the weight, 'in' (contracted with the trailing dimensions of x
      in this order) or 'out', perhaps one 'expert' (see `Layout`); or a function of the layer.
    weight: attribute that holds the weight Variable.
    bias: attribute that holds the bias Variable or None; None: there is no such attribute.
    linear: False for lookups (embeddings), whose input is the index of a row; 'all-linear' leaves
      them alone.
    check: `attach` runs one layer on random numbers and refuses one that is not x W + b; False for
      a layer whose call takes more than x.

  Raises:
    ValueError: not an nnx.Module, or words other than in, out and expert.
  """
  if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
    raise ValueError(f'register_layer takes a subclass of nnx.Module, given {cls!r}.')
  if isinstance(layout, str):
    words = tuple(layout.split())
    if set(words) - {EXPERT} != {'in', 'out'} or words.count(EXPERT) > 1:
      raise ValueError(
        f"The layout {layout!r} of {cls.__name__} must be made of the words 'in' and 'out', with "
        "at least one of each and at most one 'expert'."
      )
    equation = (lambda ndim: trailing(words, ndim)) if linear else None
    found = Layout(words=words, equation=equation)
    _LAYERS[cls] = LayerType(weight, bias, lambda layer: found, linear, check)
  else:
    _LAYERS[cls] = LayerType(weight, bias, layout, linear, check)


def layer_type(layer: Any) -> LayerType | None:
  """What is registered for the class of `layer` or the nearest class it extends."""
  return next((_LAYERS[c] for c in type(layer).__mro__ if c in _LAYERS), None)


def trailing(words: tuple[str, ...], ndim: int) -> tuple[str, str, str]:
  """The equation of a layer that contracts the last dimensions of its input."""
  letters = string.ascii_letters
  kernel = letters[: len(words)]
  ins = ''.join(c for c, w in zip(kernel, words, strict=True) if w == 'in')
  outs = ''.join(c for c, w in zip(kernel, words, strict=True) if w == 'out')
  free = letters[len(words) : len(words) + ndim - len(ins)]
  return free + ins, kernel, free + outs


def register_norm(cls: type, *, weight: str = 'scale', bias: str | None = None) -> None:
  """Lets types that work on norms (`Adapter.norms`) adapt layers of a class.

  A norm is seen as a kernel [1, out], its scale, and its input as a lookup, so that `x @ m` is the
  norm with m [1, out] for its scale.

  Args:
    cls: an nnx.Module whose `__call__(x)` gives a normalized x times its scale (plus its bias).
    weight: attribute that holds the scale [out].
    bias: attribute that holds the bias [out] or None.
  """
  layout = Layout(words=('out',))
  _LAYERS[cls] = LayerType(weight, bias, lambda layer: layout, linear=False, check=False, norm=True)


def register_point(cls: type) -> None:
  """Lets types that go on points (`Adapter.point`) adapt modules of a class; see `Point`."""
  layout = Layout(words=('in', 'out'))
  _LAYERS[cls] = LayerType('', None, lambda point: layout, linear=False, check=False, point=True)


OUTPUT = 'layer_output'


def keep(y: jax.Array) -> jax.Array:
  """y, marked as what the remat policy 'outputs' keeps: a product too dear to compute twice."""
  return checkpoint_name(y, OUTPUT)


def as_matrix(weight: jax.Array, words: tuple[str, ...]) -> jax.Array:
  """A weight with dimensions `words` -> [in, out], or [experts, in, out]; decoded if need be."""
  if isinstance(weight, _packed.Packed):
    return weight.matrix()
  order = _order(words)
  sides = ((EXPERT,), INPUTS, ('out',))
  experts, ins, outs = ([weight.shape[i] for i in order if words[i] in side] for side in sides)
  return jnp.transpose(weight, order).reshape(*experts, math.prod(ins), math.prod(outs))


def from_matrix(matrix: jax.Array, words: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
  """[in, out] -> a weight of `shape` with dimensions `words`: inverse of `as_matrix`."""
  order = _order(words)
  return jnp.transpose(
    matrix.reshape([shape[i] for i in order]), [order.index(i) for i in range(len(order))]
  )


def _order(words: tuple[str, ...]) -> list[int]:
  return sorted(range(len(words)), key=lambda i: (EXPERT, *INPUTS, 'out').index(words[i]))


@jax.custom_vjp
def frozen_dot(x: jax.Array, w: jax.Array) -> jax.Array:
  """x [..., in] @ w [in, out], keeping for the backward pass only what it needs.

  Where w is not differentiated, x is not kept; w itself is never copied, so a scan over layers
  hands its own array back to the backward pass.
  """
  return x @ w


def _frozen_dot_fwd(x: Any, w: Any) -> tuple[jax.Array, tuple]:
  kept = x.value if w.perturbed else None
  return x.value @ w.value, (kept, w.value)


def _frozen_dot_bwd(kept: tuple, dy: Any) -> tuple:
  x, w = kept
  if isinstance(dy, jax.custom_derivatives.SymbolicZero):
    return None, None
  dx = dy @ w.T
  if x is None:
    return dx, None
  return dx, rearrange(x, '... i -> (...) i').T @ rearrange(dy, '... o -> (...) o')


frozen_dot.defvjp(_frozen_dot_fwd, _frozen_dot_bwd, symbolic_zeros=True)


def tall(a: jax.Array) -> jax.Array:
  """a [n, r] itself; its gradient is made as [r, n], which for n > r XLA's CPU backend does faster.

  Without the barrier the compiler folds the transposes into a product of the slow shape: for
  x [1024, 512] and r = 8 that takes 1.5 ms instead of 0.2.
  """
  if a.ndim != 2 or a.shape[0] <= a.shape[1]:
    return a
  return jax.lax.optimization_barrier(a.T).T


@contextlib.contextmanager
def swapped(layer: nnx.Module, values: Mapping[Any, Any]) -> Generator[None]:
  """Within the block the named Variables of a layer hold other arrays; then their own again."""
  kept = {name: getattr(layer, name).get_raw_value() for name in values}
  try:
    for name, value in values.items():
      getattr(layer, name).set_raw_value(value)
    yield
  finally:
    for name, value in kept.items():
      getattr(layer, name).set_raw_value(value)


class View:
  """One call of one layer: its input as [tokens, in], its output as [tokens, out], and back.

  Args:
    layer: the layer, with its own Variables.
    forward: the layer's own `__call__` as a function of its input.
    inputs: what the layer was called with.
    groups: of a layer with experts, how many rows each has, [experts].
  """

  def __init__(
    self,
    layer: nnx.Module,
    forward: Callable[[Any], jax.Array],
    inputs: Any,
    groups: jax.Array | None = None,
  ):
    self.layer, self.forward, self.inputs, self.groups = layer, forward, inputs, groups
    found = layer_type(layer)
    assert found is not None
    self.names = found
    self.layout = found.layout(layer)
    self._bias = getattr(layer, found.bias, None) if found.bias else None
    self.equation = self.layout.equation(inputs.ndim) if self.layout.equation else None

  @property
  def kernel(self) -> nnx.Variable:
    """The Variable that holds the weight."""
    return getattr(self.layer, self.names.weight)

  @property
  def sizes(self) -> dict[str, int]:
    """{'in': n, 'out': m, 'taps': t} of the kernel."""
    return kernel_sizes(self.layout.words, self.kernel.shape)

  def bias(self) -> jax.Array:
    """The layer's bias [out], or [experts, out]; zeros where it has none."""
    experts = () if self.groups is None else self.groups.shape
    if self._bias is None:
      return jnp.zeros((*experts, self.sizes['out']))
    return self._bias[...].reshape(*experts, -1)

  def bare(self) -> jax.Array:
    """The layer's own output without its bias."""
    without = {} if self._bias is None else {self.names.bias: jnp.zeros_like(self._bias[...])}
    with swapped(self.layer, without):
      return self.forward(self.inputs)

  def with_kernel(self, matrix: jax.Array) -> jax.Array:
    """The layer's output [tokens, n] with its kernel exchanged for a matrix [in, n]."""
    shape = (*self.kernel.shape[:-1], matrix.shape[-1])
    values: dict[Any, jax.Array] = {
      self.names.weight: from_matrix(matrix, self.layout.words, shape)
    }
    if self._bias is not None:
      values[self.names.bias] = jnp.zeros((matrix.shape[-1],), matrix.dtype)
    with swapped(self.layer, values):
      y = self.forward(self.inputs)
    return y.reshape(-1, matrix.shape[-1])

  def enter(self, dtype: Any) -> Any:
    """The input as [tokens, in]: an array, a convolution's windows, or for a lookup a `Lazy`."""
    if self.equation is None:
      lazy = Lazy(self, dtype)
      return lazy.dense() if self.names.linear else lazy
    x, kernel, y = self.equation
    free, ins, _ = self._groups()
    del kernel, y
    order = [x.index(c) for c in free + ins]
    size = math.prod(self.inputs.shape[x.index(c)] for c in ins)
    return jnp.transpose(self.inputs, order).reshape(-1, size).astype(dtype)

  def flatten(self, y: jax.Array) -> jax.Array:
    """The layer's output -> [tokens, out]."""
    if self.equation is None:
      return y.reshape(-1, y.shape[-1])
    free, _, outs = self._groups()
    letters = self.equation[2]
    size = math.prod(y.shape[letters.index(c)] for c in outs)
    return jnp.transpose(y, [letters.index(c) for c in free + outs]).reshape(-1, size)

  def leave(self, y: jax.Array, like: jax.Array) -> jax.Array:
    """[tokens, out] -> the layer's output, shaped as `like`, with the layer's bias."""
    if self.equation is None:
      return self._add_bias(y.reshape(like.shape), '')
    free, _, outs = self._groups()
    letters = self.equation[2]
    order = free + outs
    y = y.reshape([like.shape[letters.index(c)] for c in order])
    return self._add_bias(jnp.transpose(y, [order.index(c) for c in letters]), letters)

  def _groups(self) -> tuple[str, str, str]:
    assert self.equation is not None
    _, kernel, y = self.equation
    words = self.layout.words
    ins = ''.join(c for c, w in zip(kernel, words, strict=True) if w == 'in')
    outs = ''.join(c for c, w in zip(kernel, words, strict=True) if w == 'out')
    return ''.join(c for c in y if c not in outs), ins, outs

  def _add_bias(self, y: jax.Array, letters: str) -> jax.Array:
    if self._bias is None:
      return y
    bias = self._bias[...].astype(y.dtype)
    if self.groups is not None:
      return y + bias[_groups.group_of_row(self.groups, y.shape[0])]
    if self.equation is None:
      return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    outs = self._groups()[2]
    shape = [s if c in outs else 1 for c, s in zip(letters, y.shape, strict=True)]
    return y + bias.reshape(shape)


class Lazy:
  """The input [tokens, in] of a lookup: one-hot rows, never made unless something needs them.

  `lazy @ m` runs the layer itself with m [in, n] for its kernel: rows of a table are gathered.
  """

  def __init__(self, view: View, dtype: Any):
    self._view, self.dtype = view, dtype
    layout = view.layout
    sizes = [s for s, w in zip(view.kernel.shape, layout.words, strict=True) if w in INPUTS]
    self.ins = math.prod(sizes)

  def __matmul__(self, matrix: jax.Array) -> jax.Array:
    return self._view.with_kernel(matrix).astype(self.dtype)

  def dense(self) -> jax.Array:
    """The input as an array [tokens, in]."""
    return self @ jnp.eye(self.ins, dtype=self.dtype)

  def __mul__(self, other: Any) -> jax.Array:
    return self.dense() * other

  __rmul__ = __mul__

  def __add__(self, other: Any) -> jax.Array:
    return self.dense() + other

  __radd__ = __add__


def kernel_sizes(words: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, int]:
  """{'in': n, 'out': m, 'taps': t} of a weight."""
  sizes = {'in': 1, 'out': 1, EXPERT: 1, TAP: 1}
  for word, size in zip(words, shape, strict=True):
    sizes[word] *= size
  return {'in': sizes['in'] * sizes[TAP], 'out': sizes['out'], 'taps': sizes[TAP]}

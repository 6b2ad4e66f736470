"""The contract of an adapter type: Slot, Base, Adapter."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from peftlab import _registry

Init = Callable[..., jax.Array]


def zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Init of a slot with zeros."""
  del key
  return jnp.zeros(shape, dtype)


def constant(value: float) -> Init:
  """Init of a slot with one number, a scale for example."""
  return _Constant(float(value))


@dataclasses.dataclass(frozen=True)
class _Constant:
  """An init that compares equal to another of the same number, so that its program is shared."""

  value: float

  def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.full(shape, self.value, dtype)


def initial(default: Any, doc: str = '') -> Any:
  """A field that only feeds the initial values of slots: two values share one compiled program.

  `apply` and `fuse` must not read it; what they need of it is a slot (alpha -> the slot 'scale').
  """
  return dataclasses.field(default=default, compare=False, metadata={'doc': doc})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
  """One array of an adapter, for one kernel [in, out].

  Attributes:
    dims: a word per dimension, separated by spaces: 'in rank', 'rank out', 'out', '' (a scalar).
      'in' and 'out' are the kernel's sizes and take its spec; any other word is a field of the
      adapter that holds an int, replicated.
    init: `init(key, shape, dtype) -> array`; with `needs_weight`, `init(key, shape, dtype, weight)`
      where weight is the kernel [in, out] in float32.
    needs_weight: the initial value is made from the kernel.
    trainable: False for a frozen part (a scale, a random projection).
    shared: one array for the whole model instead of one per kernel.
    role: what an optimizer may treat apart ('a', 'b', 'magnitude'); default: the slot's name.
    dtype: dtype in memory; arithmetic is done in the dtype of the layer's input.
  """

  dims: str
  init: Init = zeros
  needs_weight: bool = False
  trainable: bool = True
  shared: bool = False
  role: str | None = None
  dtype: Any = jnp.float32


class Base(Protocol):
  """The frozen kernel as an adapter's `apply` sees it."""

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [..., in] -> x W [..., out], without bias."""

  def weight(self) -> jax.Array:
    """The kernel [in, out], dequantized if it was quantized, in the dtype of the layer's input."""

  def dropout(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    """x with dropout in training, x itself in eval."""


class Values(Mapping):
  """The arrays of one adapter at one kernel, by slot: `p.a` or `p['a']`. Knows what was read."""

  def __init__(self, arrays: Mapping[str, jax.Array]):
    self._arrays = dict(arrays)
    self.read: set[str] = set()

  def __getitem__(self, name: str) -> jax.Array:
    if name not in self._arrays:
      near = _registry.did_you_mean(name, self._arrays)
      raise ValueError(f'No slot {name!r}{near or "."} Slots: {", ".join(self._arrays)}.')
    self.read.add(name)
    return self._arrays[name]

  def __getattr__(self, name: str) -> jax.Array:
    if name.startswith('_'):
      raise AttributeError(name)
    return self[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._arrays)

  def __len__(self) -> int:
    return len(self._arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter(abc.ABC):
  """An adapter type: a frozen dataclass whose fields are its flags.

  It sees one kernel [in, out] and an input [..., in]; never a mesh or layer axis, quantization, a
  dtype cast, a checkpoint or a flag. Claims about it are class variables, and the conformance
  suite fails a false one, either way.

  Attributes:
    identity_at_start: a fresh adapter leaves the output as it was.
    mergeable: `fuse` gives a kernel whose plain matmul equals `apply`.
    embeddings: `apply` also works where the kernel is an embedding table.
    peft_type: the name of this type in HF PEFT's adapter_config.json, or None; with it come
      `to_peft` and `from_peft`.
    peft_fields: the fields that PEFT's config holds.
  """

  identity_at_start: ClassVar[bool] = True
  mergeable: ClassVar[bool] = True
  embeddings: ClassVar[bool] = True
  peft_type: ClassVar[str | None] = None
  peft_fields: ClassVar[tuple[str, ...]] = ()

  @abc.abstractmethod
  def slots(self) -> dict[str, Slot]:
    """The arrays of this adapter at one kernel, by name."""

  @abc.abstractmethod
  def apply(self, x: jax.Array, base: Base, p: Values) -> jax.Array:
    """x [..., in] -> y [..., out], without the layer's bias."""

  def fuse(self, w: jax.Array, p: Values) -> jax.Array:
    """The kernel [in, out] whose plain matmul equals `apply`, from w [in, out]; in float32.

    Raises:
      ValueError: this type has no such kernel (`mergeable` is False).
    """
    del w, p
    raise ValueError(f'{type(self).__name__} cannot be merged into a kernel.')

  def to_peft(
    self, values: Mapping[str, Mapping[str, Any]], *, embeddings: Collection[str] = ()
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and the tensors of HF PEFT's folder for this adapter.

    Args:
      values: {layer: {slot: numpy array of one layer}}.
      embeddings: which of the layers are embeddings.
    """
    del values, embeddings
    raise ValueError(f'{type(self).__name__} has no form in HF PEFT.')

  @classmethod
  def from_peft(
    cls, config: Mapping[str, Any], tensors: Mapping[str, Any]
  ) -> tuple[Adapter, dict[str, dict[str, Any]]]:
    """Inverse of `to_peft`: the adapter, and {layer: {slot: numpy array of one layer}}."""
    del config, tensors
    raise ValueError(f'{cls.__name__} has no form in HF PEFT.')

  @property
  def stochastic(self) -> bool:
    """Whether `apply` draws random numbers in training (dropout above 0)."""
    return bool(getattr(self, 'dropout', 0.0))


def register_adapter(name: str) -> Callable[[type], type]:
  """Class decorator: files an `Adapter` type under a short name.

  Raises:
    ValueError: not a frozen dataclass that extends Adapter, or the name is taken.
  """

  def add(cls: type) -> type:
    own = isinstance(cls, type) and '__dataclass_fields__' in vars(cls)
    frozen = own and getattr(cls, '__dataclass_params__').frozen  # noqa: B009
    if not (frozen and issubclass(cls, Adapter)):
      raise ValueError(
        f'The adapter {name!r} ({cls!r}) must be a frozen dataclass that extends peftlab.Adapter.'
      )
    missing = sorted(cls.__abstractmethods__)
    if missing:
      raise ValueError(f'The adapter {name!r} ({cls!r}) lacks {", ".join(missing)}.')
    return _registry.adapters.register(name)(cls)

  return add


def adapter_types() -> tuple[str, ...]:
  """The short names of all registered adapter types, sorted."""
  return _registry.adapters.names()


def slot_shape(slot: Slot, adapter: Adapter, *, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """The shape of a slot at a kernel with sizes {'in': n, 'out': m}.

  Raises:
    ValueError: a word that is neither in, out nor an int field of the adapter, or a size below 1.
  """
  shape = []
  for word in slot.dims.split():
    size = sizes.get(word, getattr(adapter, word, None))
    if not isinstance(size, int) or isinstance(size, bool):
      fields = [f.name for f in dataclasses.fields(adapter)]
      if word in fields:
        raise ValueError(f'{type(adapter).__name__}.{word} is {size!r}; it must be an int.')
      near = _registry.did_you_mean(word, ['in', 'out', *fields])
      raise ValueError(
        f'{type(adapter).__name__} has a slot with dims {slot.dims!r}, and {word!r} is neither '
        f"'in', 'out' nor a field that holds an int{near or '.'}"
      )
    if size < 1:
      raise ValueError(f'{type(adapter).__name__}.{word} is {size}; it must be at least 1.')
    shape.append(size)
  return tuple(shape)

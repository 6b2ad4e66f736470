"""The contract of an adapter type: what it is given (Base) and what it gives (Adapter)."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
import dataclasses
import math
from typing import Any, ClassVar

import jax
import numpy as np

from peftlab import _registry

# Re-exported: the contract is one module to those who import it.
from peftlab._base import Base, PlainBase, PointBase, dropped  # noqa: F401
from peftlab._slot import Init, Slot, Values, constant, copy, initial, together, zeros  # noqa: F401


@dataclasses.dataclass(frozen=True)
class Kernel:
  """The arrays of an adapter at one layer path, as `after_step` sees them.

  Attributes:
    values: {slot: array [layers, ...]} after the update; 1 layer where it is not a stack. Shared
      slots are not among them.
    gradients: likewise, of the slots that are trained.
  """

  values: Mapping[str, jax.Array]
  gradients: Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter(abc.ABC):
  """An adapter type: a frozen dataclass whose fields are its flags.

  It sees one kernel [in, out] and an input [..., in]; never a mesh or layer axis, quantization, a
  dtype cast, a checkpoint or a flag. Claims about it are class variables, and the conformance
  suite fails a false one, either way.

  A type that goes on points (see `peftlab.Point`) sees a sequence instead: `apply` is given
  [batch, length, out] and gives it back, with rows of its own in front if it has any. There 'in'
  and 'out' are both the number of features.

  Attributes:
    point: the role of the points that the type goes on ('inputs', 'prefix'); '': on weights.
    default_where: of a type on weights the layers that it is for, in a word of `peftlab.attach`.
    reads_batch: `apply` asks `base.batch` for the tokens of the batch.
    started_by: the function that attaches it with the first values it is named for, where `attach`
      alone cannot make them; '': it can.
    identity_at_start: a fresh adapter leaves the output as it was.
    mergeable: `fuse` gives a kernel whose plain matmul equals `apply`.
    additive: what `fuse` adds to a kernel and `fuse_bias` to a bias is the same whatever they
      hold; such changes can be weighted and summed (`peftlab.fuse.combine`).
    embeddings: `apply` also works where the kernel is an embedding table.
    norms: `apply` also works where the kernel is the scale [1, out] of a norm.
    conv: `apply` also works where the kernel is a convolution's.
    experts: `apply` also works where the kernel is one of a stack of experts.
    quantized_base: it works on a base of codes, which `base.weight()` dequantizes.
    mixed_batch: `apply` may be mapped over rows that each have arrays of their own.
    bounds: {field: (least, most)} that a field must lie between, both included.
    small: fields of an instance for small kernels, such as Linear(48 -> 32).
    peft: how HF PEFT writes this type, a `peftlab.formats.peft_form.PeftForm`; None: PEFT lacks it.
    peft_rows: how PEFT writes it where it is of virtual tokens, a `RowsForm` of `peft_rows`.
    peft_beside: how PEFT writes it beside another type, a `Beside` of the same module; None: not.
  """

  point: ClassVar[str] = ''
  default_where: ClassVar[str] = 'all-linear'
  reads_batch: ClassVar[bool] = False
  started_by: ClassVar[str] = ''
  identity_at_start: ClassVar[bool] = True
  mergeable: ClassVar[bool] = True
  additive: ClassVar[bool] = True
  embeddings: ClassVar[bool] = True
  norms: ClassVar[bool] = False
  conv: ClassVar[bool] = True
  experts: ClassVar[bool] = True
  quantized_base: ClassVar[bool] = True
  mixed_batch: ClassVar[bool] = True
  bounds: ClassVar[Mapping[str, tuple[float, float]]] = {'rank': (1, math.inf)}
  small: ClassVar[Mapping[str, Any]] = {}
  peft: ClassVar[Any] = None
  peft_rows: ClassVar[Any] = None
  peft_beside: ClassVar[Any] = None

  def __post_init__(self):
    """Checks that every field has its declared type; a type's own checks come after this one."""
    for field in dataclasses.fields(self):
      value = _typed(getattr(self, field.name), field.type)
      if value is None:
        name = field.type if isinstance(field.type, str) else field.type.__name__
        given = getattr(self, field.name)
        subject = f'{type(self).__name__}.{field.name}'
        kind = type(given).__name__
        raise ValueError(f'{subject} is {given!r} ({kind}); it must be of type {name}.')
      object.__setattr__(self, field.name, value)
    for name, (least, most) in self.bounds.items():
      value = getattr(self, name, least)
      if not isinstance(value, (int, float)) or least <= value <= most or math.isnan(value):
        continue
      span = f'at least {least}' if most == math.inf else f'between {least} and {most}'
      raise ValueError(f'{type(self).__name__}.{name} is {value}; it must be {span}.')

  @abc.abstractmethod
  def slots(self) -> dict[str, Slot]:
    """The arrays of this adapter at one kernel, by name."""

  def sizes(self, kernel: Mapping[str, int]) -> Mapping[str, int]:
    """More words for `dims`; a 0 leaves out the slots that have the word.

    Args:
      kernel: 'in' and 'out'; 'taps', the places in a convolution's window, 1 elsewhere; 'channels',
        in / taps. The rows of a kernel are (channel, tap).

    Raises:
      ValueError: the kernel does not fit the fields.
    """
    del kernel
    return {}

  def start(
    self,
    key: jax.Array,
    sizes: tuple[int, int],
    weight: jax.Array | None = None,
    full: jax.Array | None = None,
  ) -> dict[str, jax.Array]:
    """First values of every slot whose init is `peftlab.together`, at one kernel.

    Args:
      key: the kernel's own.
      sizes: (in, out).
      weight: [in, out] float32, dequantized; None unless one of these slots has `needs_weight`.
      full: likewise, as it was before it was quantized where `attach` was told (`full=`), else the
        same as `weight`.
    """
    del key, sizes, weight, full
    raise ValueError(f'{type(self).__name__} has slots that start together, but no `start`.')

  @abc.abstractmethod
  def apply(self, x: jax.Array, base: Base, p: Values) -> jax.Array:
    """x [..., in] -> y [..., out], without the layer's bias.

    At a point x [batch, length, out] -> y [batch, n + length, out], n rows before the sequence.
    """

  def fuse(self, w: jax.Array, p: Values) -> jax.Array:
    """The kernel [in, out] whose plain matmul equals `apply`, from w [in, out]; in float32.

    Raises:
      ValueError: this type has no such kernel (`mergeable` is False).
    """
    del w, p
    raise ValueError(f'{type(self).__name__} cannot be merged into a kernel.')

  def fuse_bias(self, b: jax.Array, p: Values) -> jax.Array:
    """The bias [out] of the fused layer, in float32, from the layer's own (zeros: it has none)."""
    del p
    return b

  def to_factors(self, p: Values) -> tuple[jax.Array, jax.Array] | None:
    """(a [in, k], b [k, out]) whose product is what `fuse` adds; None: it has no such form."""
    del p
    return None

  @classmethod
  def from_factors(
    cls, a: jax.Array, b: jax.Array, bias: jax.Array | None = None
  ) -> tuple[Adapter, dict[str, jax.Array]]:
    """An adapter and its slots that add a [in, k] @ b [k, out] to a kernel, and bias [out].

    Inverse of `to_factors`; also given shapes.

    Raises:
      ValueError: this type cannot hold such a change.
    """
    del a, b, bias
    raise ValueError(f'{cls.__name__} cannot hold a change that is given as two factors.')

  def after_step(
    self, kernels: Sequence[Kernel], *, step: jax.Array, steps: int
  ) -> Sequence[Mapping[str, jax.Array]]:
    """New values of some slots after an update, for every kernel that has this adapter.

    It is traced into the training step, so shapes are fixed and nothing compiles anew.

    Args:
      kernels: every layer path, its layers stacked.
      step: [] int32, updates before this one.
      steps: of the whole run.

    Returns:
      {slot: array} per kernel.
    """
    del step, steps
    return [{} for _ in kernels]

  def penalty(self, p: Values) -> jax.Array | None:
    """What is added to the loss, the mean of it over all kernels, [] float32; None: nothing."""
    del p

  @property
  def where(self) -> str:
    """The layers that it goes on where none are named: `default_where`, or the points of a role."""
    return self.point or self.default_where

  @property
  def stochastic(self) -> bool:
    """Whether `apply` draws random numbers in training (dropout above 0)."""
    return bool(getattr(self, 'dropout', 0.0))


def _typed(value: Any, declared: Any) -> Any:
  """The value as the plain int, float, bool or str that was declared; None if it is not one.

  Numbers of numpy and JAX are taken for what they hold; fields of other types pass as they are.
  """
  kinds: dict[str, tuple] = {'bool': (bool, np.bool_), 'int': (int, np.integer), 'str': (str,)}
  kinds['float'] = (float, np.floating, *kinds['int'])
  name = declared if isinstance(declared, str) else getattr(declared, '__name__', '')
  if name not in kinds:
    return value
  if isinstance(value, jax.Array) and not value.ndim and not isinstance(value, jax.core.Tracer):
    value = np.asarray(value)[()]
  if not isinstance(value, kinds[name]) or (name != 'bool' and isinstance(value, bool)):
    return None
  return {'bool': bool, 'int': int, 'float': float, 'str': str}[name](value)


def fused(adapter: Adapter, what: str, own: jax.Array, p: Values) -> jax.Array:
  """`adapter.fuse` or `fuse_bias` of an array, checked to have its shape.

  Raises:
    ValueError: it gave something else.
  """
  with noted(adapter, what, f'an array of shape {own.shape}'):
    made = getattr(adapter, what)(own, p)
  if getattr(made, 'shape', None) != own.shape:
    given = f'shape {made.shape}' if hasattr(made, 'shape') else type(made).__name__
    of = 'kernel' if what == 'fuse' else 'bias'
    raise ValueError(
      f'{type(adapter).__name__}.{what} gave {given} for a {of} of shape {own.shape}; expected an '
      'array of that shape.'
    )
  return made


@contextlib.contextmanager
def noted(adapter: Adapter, what: str, layer: str) -> Generator[None]:
  """Within the block an exception is told which type raised it, in what, and at which layer."""
  try:
    yield
  except Exception as error:
    error.add_note(f'Raised by the adapter type {type(adapter).__name__} in {what} ({layer}).')
    raise


def register_adapter(name: str) -> Callable[[type], type]:
  """Class decorator: files an `Adapter` type under a short name.

  Raises:
    ValueError: not a frozen dataclass that extends Adapter, or the name is taken.
  """

  def add(cls: type) -> type:
    _check_type(name, cls)
    return _registry.adapters.register(name)(cls)

  return add


def _check_type(name: str, cls: Any) -> None:
  own = isinstance(cls, type) and '__dataclass_fields__' in vars(cls)
  frozen = own and getattr(cls, '__dataclass_params__').frozen  # noqa: B009
  if not (frozen and issubclass(cls, Adapter)):
    raise ValueError(
      f'The adapter {name!r} ({cls!r}) must be a frozen dataclass that extends peftlab.Adapter.'
    )
  for claim in (n for n, v in vars(Adapter).items() if isinstance(v, bool)):
    stated = getattr(cls, claim)
    if not isinstance(stated, (bool, property)):
      raise ValueError(f'The adapter {name!r} ({cls!r}) has {claim} = {stated!r}; expected a bool.')
  missing = sorted(cls.__abstractmethods__)
  if missing:
    raise ValueError(f'The adapter {name!r} ({cls!r}) lacks {", ".join(missing)}.')


_registry.adapters.check = _check_type  # also of what installed packages have


def adapter_types() -> tuple[str, ...]:
  """The short names of all registered adapter types, sorted."""
  return _registry.adapters.names()


def slot_shape(slot: Slot, adapter: Adapter, *, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """The shape of a slot at a kernel with sizes {'in': n, 'out': m, 'taps': t}; 1 tap by default.

  Raises:
    ValueError: a word that is neither in, out, a number nor an int of the adapter, a size below 1,
      or a quotient that does not come out even.
  """
  kernel = {'taps': 1, **sizes}
  kernel['channels'] = kernel['in'] // kernel['taps']
  every = {**kernel, **(more := _more_sizes(adapter, kernel))}
  words = slot.dims.split()
  return tuple(0 if more.get(w) == 0 else _size(w, slot, adapter, every) for w in words)


def _more_sizes(adapter: Adapter, kernel: Mapping[str, int]) -> dict[str, int]:
  """What `sizes` gives, checked."""
  kind, fields = type(adapter).__name__, {f.name for f in dataclasses.fields(adapter)}
  with noted(adapter, 'sizes', f'a kernel {dict(kernel)}'):
    more = adapter.sizes(dict(kernel))
  if not isinstance(more, Mapping):
    raise ValueError(f'{kind}.sizes gave {more!r}; expected {{word: int}}.')
  for word, size in more.items():
    if not isinstance(word, str) or word in kernel or word in fields:
      raise ValueError(
        f'{kind}.sizes gave the word {word!r}; expected words that are no field of the type and '
        f'none of {", ".join(kernel)}.'
      )
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
      raise ValueError(f'{kind}.sizes gave {word!r} as {size!r}; expected an int.')
  return {word: int(size) for word, size in more.items()}


def slots_at(
  adapter: Adapter, *, sizes: Mapping[str, int], bias: bool = True
) -> tuple[dict[str, Slot], dict[str, tuple[int, ...]]]:
  """The slots that an adapter has at a kernel with sizes {'in': n, 'out': m}, and their shapes.

  Args:
    adapter: any.
    sizes: of the kernel.
    bias: whether the layer has one.

  Raises:
    ValueError: a field that is not finite, or see `slot_shape`.
  """
  _check_finite(adapter)
  every = {n: s for n, s in adapter.slots().items() if bias or s.of != 'bias'}
  shapes = {n: slot_shape(s, adapter, sizes=sizes) for n, s in every.items()}
  shapes = {n: shape for n, shape in shapes.items() if 0 not in shape}
  return {n: s for n, s in every.items() if n in shapes}, shapes


def _check_finite(adapter: Adapter) -> None:
  """Not a matter of `__post_init__`: nothing may depend on what an `initial` field holds."""
  for field in dataclasses.fields(adapter):
    value = getattr(adapter, field.name)
    if isinstance(value, float) and not math.isfinite(value):
      name = f'{type(adapter).__name__}.{field.name}'
      raise ValueError(f'{name} is {value}; it must be a finite number.')


def _size(word: str, slot: Slot, adapter: Adapter, sizes: Mapping[str, int]) -> int:
  if word.isdigit() and int(word):
    return int(word)
  if '/' in word:
    whole, _, part = word.partition('/')
    total, by = (_size(w, slot, adapter, sizes) for w in (whole, part))
    if total % by:
      kind = type(adapter).__name__
      told = f'{by}, in the dims {slot.dims!r} of {kind},'
      subject = told if part.isdigit() else f'{kind}.{part} is {by}; it'
      raise ValueError(f'{subject} must divide {whole}, which is {total}.')
    return total // by
  size = sizes.get(word, getattr(adapter, word, None))
  if not isinstance(size, int) or isinstance(size, bool):
    fields = [f.name for f in dataclasses.fields(adapter)]
    if word in fields:
      raise ValueError(f'{type(adapter).__name__}.{word} is {size!r}; it must be an int.')
    near = _registry.did_you_mean(word, [*sizes, *fields])
    raise ValueError(
      f'{type(adapter).__name__} has a slot with dims {slot.dims!r}, and {word!r} is neither '
      f"'in', 'out', 'channels', 'taps', a number of at least 1, a word of `sizes`, nor a field "
      f'that holds an int{near or "."}'
    )
  if size < 1:
    raise ValueError(f'{type(adapter).__name__}.{word} is {size}; it must be at least 1.')
  return size


def divided(adapter: Adapter) -> tuple[str, ...]:
  """The quotients in the dims of an adapter's slots: what must divide what ('in/block')."""
  words = [w for slot in adapter.slots().values() for w in slot.dims.split() if '/' in w]
  return tuple(dict.fromkeys(words))

"""The contract of a quantizer: a weight as tiles of inputs -> codes and scales, and back."""

from __future__ import annotations

import abc
from collections.abc import Mapping
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from peftlab import _parts, _registry

Arrays = dict[str, Any]
SCALE_DTYPES = ('bfloat16', 'float16', 'float32')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer(abc.ABC):
  """A way to hold a kernel: a frozen dataclass whose fields are its options.

  It sees a kernel as w [tiles, tile, *out]: the inputs in tiles that share a scale, and one or more
  dimensions of outputs. Never a stack axis, a mesh, or how a layer uses its weight.

  `dims` says what each array is, the codes first: a word per dimension. 'tiles' counts tiles and
  takes the mesh axes of the inputs; 'out' stands for all dimensions of outputs and takes theirs;
  'groups' is some number of groups of outputs and takes the axes of the first; any other word is
  replicated. 'tiles' comes first and 'out' last.

  Attributes:
    tile: inputs that share a scale; 0: all of them.
    exact_tile: no other tile than the default can be had.
    gguf_kind: the type of GGUF whose blocks `from_blocks` takes.
  """

  dims: ClassVar[Mapping[str, str]] = {}
  exact_tile: ClassVar[bool] = False
  gguf_kind: ClassVar[str | None] = None

  tile: int = 64

  def __post_init__(self):
    if isinstance(self.tile, bool) or not isinstance(self.tile, int) or self.tile < 0:
      raise ValueError(
        f'{self.name} has tile={self.tile!r}; expected a number of inputs, or 0 for all of them.'
      )
    wanted = type(self).__dataclass_fields__['tile'].default
    if self.exact_tile and self.tile != wanted:
      raise ValueError(f'{self.name} has tile={self.tile}; this format knows {wanted} only.')

  @property
  def name(self) -> str:
    """The name under which it is registered."""
    return _registry.quantizers.name_of(self)

  @abc.abstractmethod
  def encode(self, w: jax.Array) -> Arrays:
    """w [tiles, tile, *out] float32 -> arrays; each tile of each output by itself."""

  @abc.abstractmethod
  def decode(self, arrays: Arrays, dtype: Any) -> jax.Array:
    """Arrays as `encode` gave them -> [tiles, tile, *out], computed in `dtype`."""

  def factors(self, arrays: Arrays, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """What `decode` gives as (numbers [tiles, tile, *out], a factor [*out] of them, or None).

    A product that is multiplied by the factor behind the sum over inputs has less to decode.
    """
    return self.decode(arrays, dtype), None

  def settled(self, platform: str, tile: int) -> Quantizer:
    """The quantizer with what depends on the device decided: 'cpu', 'gpu' or 'tpu'."""
    del platform, tile
    return self

  def compress(self, arrays: Arrays) -> Arrays:
    """What `encode` gave for all tiles -> what is held (`dims`): scales of scales, for example."""
    return arrays

  def expand(self, arrays: Arrays) -> Arrays:
    """Inverse of `compress`."""
    return arrays

  @abc.abstractmethod
  def bits(self, inputs: int, out: tuple[int, ...]) -> float:
    """Bits per weight of a kernel [inputs, *out], by arithmetic."""

  def from_blocks(self, blocks: np.ndarray) -> Arrays:
    """Blocks of a GGUF tensor, uint8 [out, tiles, bytes], -> numpy arrays as `decode` takes them.

    Raises:
      ValueError: this quantizer is none of GGUF's types.
    """
    del blocks
    raise ValueError(f'{self.name} is not a type of GGUF.')


def register(name: str) -> Any:
  """Class decorator: files a `Quantizer` under a short name.

  Raises:
    ValueError: not a frozen dataclass that extends Quantizer, or the name is taken.
  """

  def add(cls: Any) -> Any:
    own = isinstance(cls, type) and '__dataclass_fields__' in vars(cls)
    if not (own and issubclass(cls, Quantizer) and not cls.__abstractmethods__ and cls.dims):
      raise ValueError(
        f'The quantizer {name!r} ({cls!r}) must be a frozen dataclass that extends '
        'peftlab.quant.Quantizer and says its dims.'
      )
    return _registry.quantizers.register(name)(cls)

  return add


def get_quantizer(given: str | Quantizer) -> Quantizer:
  """The quantizer of a name with its options, 'nf4(double=false, tile=32)'; or the one given.

  Raises:
    ValueError: no quantizer of that name, or an option that it does not have.
  """
  if isinstance(given, Quantizer):
    return given
  if not isinstance(given, str):
    raise ValueError(f'A quantizer is a name or a Quantizer, given {given!r}.')
  name, opened, rest = given.strip().partition('(')
  if opened and not rest.endswith(')'):
    raise ValueError(f'{given!r} has no closing parenthesis; expected NAME(OPTION=VALUE, ...).')
  cls = _registry.quantizers.get(name.strip())
  options: dict[str, Any] = {}
  for pair in filter(None, (p.strip() for p in rest.removesuffix(')').split(','))):
    key, equals, value = (part.strip() for part in pair.partition('='))
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if key not in fields or not equals:
      near = _registry.did_you_mean(key, fields)
      raise ValueError(
        f'{given!r} has no option {key!r}{near or "."} Options of {name}: {", ".join(fields)}.'
      )
    options[key] = _option(given, key, value, fields[key].default)
  return cls(**options)


def _option(given: str, key: str, value: str, default: Any) -> Any:
  if isinstance(default, bool):
    if value.lower() in ('true', 'false'):
      return value.lower() == 'true'
    raise ValueError(f'{given!r} has {key}={value}; expected true or false.')
  if isinstance(default, int):
    if value.isdecimal():
      return int(value)
    raise ValueError(f'{given!r} has {key}={value}; expected a whole number, 0 or more.')
  return value


def check_scale_dtype(quantizer: Any) -> None:
  """Raises ValueError unless `scale_dtype` is one that scales can have."""
  given = quantizer.scale_dtype
  if given not in SCALE_DTYPES:
    near = _registry.did_you_mean(str(given), SCALE_DTYPES)
    raise ValueError(
      f'{quantizer.name} has scale_dtype={given!r}{near or "."} Choices: {", ".join(SCALE_DTYPES)}.'
    )


def scale_of(peak: jax.Array, bound: float, dtype: str) -> jax.Array:
  """Scales that bring `peak` to `bound`, in `dtype`; 1 where there is nothing to scale."""
  scale = peak / bound
  smallest = float(np.sqrt(np.finfo(np.float32).tiny))
  return jnp.where(scale < smallest, jnp.ones_like(scale), scale).astype(dtype)


def dtype_bits(dtype: Any) -> int:
  """Bits of one element of a dtype."""
  return _parts.bits(jnp.dtype(dtype))


def per_tile(inputs: int, tile: int) -> float:
  """Tiles per input, for `bits`."""
  return 1 / (tile or inputs)


def sizes(out: tuple[int, ...]) -> int:
  """Outputs in all."""
  return math.prod(out)

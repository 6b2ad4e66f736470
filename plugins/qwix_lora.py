"""qwix's own LoRA provider as an adapter type: its arithmetic, our slots, layouts and meshes."""

from collections.abc import Generator
import contextlib
import dataclasses
from typing import Any
import warnings

from flax import nnx
import jax
import qwix

import peftlab
from peftlab import initial
from peftlab.appliers import Applier, absorb


@peftlab.register_adapter('qwix_lora')
@dataclasses.dataclass(frozen=True, kw_only=True)
class QwixLoRA(peftlab.Adapter):
  """LoRA computed by `qwix.LoraProvider`. Trainable: rank (in + out) per kernel [in, out].

  Attributes:
    rank: columns of A [in, rank] and rows of B [rank, out].
    alpha: the provider scales the product by alpha / rank.
  """

  rank: int = 8
  alpha: float = initial(16.0)

  def __post_init__(self):
    super().__post_init__()
    if self.rank < 1:
      raise ValueError(f'QwixLoRA rank is {self.rank}; it must be at least 1.')

  def slots(self):
    return {
      'a': peftlab.Slot(dims='in rank', init=jax.nn.initializers.he_uniform()),
      'b': peftlab.Slot(dims='rank out'),
      'scale': peftlab.Slot(
        dims='', init=peftlab.constant(self.alpha / self.rank), trainable=False
      ),
    }

  def apply(self, x, base, p):
    # The provider's own scale is static; 1 here, so that changing alpha compiles nothing.
    provider = qwix.LoraProvider(module_path='.*', rank=self.rank, alpha=float(self.rank))
    x = x.dense() if hasattr(x, 'dense') else x
    holder = _Kernel(base.weight(), p.a, p.b * p.scale)
    with _old_names():
      return _intercepted(holder, provider, x, skip_nnx_init=True)(x)

  def fuse(self, w, p):
    return w + (p.a * p.scale) @ p.b


class _Kernel(nnx.Module):
  """One kernel with its factors under the names by which qwix finds them."""

  def __init__(self, kernel: jax.Array, a: jax.Array, b: jax.Array):
    self.kernel = nnx.Param(kernel)
    self.kernel_lora_a, self.kernel_lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)

  def __call__(self, x: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, self.kernel[...], (((x.ndim - 1,), (0,)), ((), ())))


@contextlib.contextmanager
def _old_names() -> Generator[None]:
  """Silences nnx about its old names, which qwix 0.1.8 calls."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    yield


def _intercepted(model: nnx.Module, provider: Any, *inputs: Any, **options: Any) -> Any:
  options.setdefault('rngs', nnx.Rngs(0))
  with _old_names():
    return qwix.apply_lora_to_model(model, provider, *inputs, **options)


def create(
  layers: nnx.Module, x: jax.Array, *, rule: Any, applier: Applier, rngs: nnx.Rngs
) -> nnx.Module:
  """Lets qwix make the factors while a stack runs; the stack with them, every base array shared.

  Args:
    layers: a stack whose layers map x to x.
    x: an input of the first layer.
    rule: a `qwix.LoraRule` (or a list of them).
    applier: runs the stack.
    rngs: one draw gives every layer its own key.

  Raises:
    ValueError: the rule matches nothing in a layer.
  """
  provider = qwix.LoraProvider(rule if isinstance(rule, list) else [rule])
  parts = peftlab.split(layers)

  def body(layer: nnx.Module, carry: tuple) -> tuple:
    x, key = carry
    key, here = jax.random.split(key)
    made = _intercepted(layer, provider, x, rngs=nnx.Rngs(here))
    if not _move_factors(made, layer):
      raise ValueError(f'The qwix rule {rule} matches no product of a weight in a layer.')
    return layer(x), key

  _, created = applier.apply(parts, (x, rngs.params()), body)
  return peftlab.merge(absorb(parts, created))


def _move_factors(source: nnx.Module, target: nnx.Module) -> int:
  """Gives `target` the LoRA Variables that `source`, a clone of it, has and it has not."""
  modules: dict[Any, Any] = dict(nnx.iter_graph(target))
  moved = 0
  for path, leaf in nnx.iter_graph(source):
    if isinstance(leaf, nnx.LoRAParam) and path not in modules:
      setattr(modules[path[:-1]], str(path[-1]), leaf)
      moved += 1
  return moved

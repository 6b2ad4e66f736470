"""ExpertDense: one linear map per expert, on tokens that are sorted by expert."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlab import _groups, _kernel


class ExpertDense(nnx.Module):
  """A stack of linear maps: row i of x goes through the map of the expert that it belongs to.

  Attributes:
    kernel: [experts, in, out], with metadata `axes` ('experts', 'embed', 'mlp').
    bias: [experts, out] or None.
    shape: of the kernel of one layer, without stack axes.
    role: 'experts', the word that names it in `where`.
  """

  in_dims = 1

  def __init__(
    self,
    experts: int,
    inputs: dict[str, int],
    outputs: dict[str, int],
    *,
    rngs: nnx.Rngs,
    bias: bool = False,
    dtype: Any = jnp.float32,
  ):
    """Random weights of variance 1 / in.

    Args:
      experts: how many.
      inputs: {logical axis: size} of the contracted dimension.
      outputs: likewise of the other one.
      rngs: has the stream 'params'.
      bias: whether each expert adds one, starting at 0.
      dtype: of the weights.
    """
    ((in_axis, ins),), ((out_axis, outs),) = inputs.items(), outputs.items()
    self.shape = (experts, ins, outs)
    values = jax.random.normal(rngs.params(), self.shape, dtype) * jnp.asarray(ins**-0.5, dtype)
    self.kernel = nnx.Param(values, axes=('experts', in_axis, out_axis))
    zeros = jnp.zeros((experts, outs), dtype)
    self.bias = nnx.Param(zeros, axes=('experts', out_axis)) if bias else None
    self.role = 'experts'

  def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x [tokens, in] -> [tokens, out], in the dtype of x.

    Args:
      x: sorted by expert: the first group_sizes[0] rows are for expert 0, and so on.
      group_sizes: [experts] int32; their sum is the number of rows.
    """
    y = jax.lax.ragged_dot(x, self.kernel[...].astype(x.dtype), group_sizes)
    y = _kernel.keep(y)
    if self.bias is None:
      return y
    return y + self.bias[...].astype(y.dtype)[_groups.group_of_row(group_sizes, x.shape[0])]


def _layout(layer: ExpertDense) -> _kernel.Layout:
  return _kernel.Layout(
    words=('expert', 'in', 'out'),
    shape=layer.shape,
    equation=lambda ndim: ('dabc'[: ndim - 1] + 'f', 'efg', 'dabc'[: ndim - 1] + 'g'),
  )


_kernel.register_layer(ExpertDense, _layout, check=False)

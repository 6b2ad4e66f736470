"""OFT: blocks of the input are rotated (Qiu et al. 2023, arXiv:2306.07280)."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax.numpy as jnp

import peftlab
from peftlab.formats.peft_form import Key, PeftForm, Tensor
from peftlab.plugins import rotations


def _fields(config: Mapping[str, Any], path: str, shapes: Mapping[str, tuple]) -> dict[str, Any]:
  """The size of a block, b (b - 1) / 2 numbers each; of which side the blocks are."""
  del path
  end, shape = next(iter(shapes.items()))
  terms = config.get('num_cayley_neumann_terms', 5) if config.get('use_cayley_neumann', True) else 0
  size = (1 + math.isqrt(1 + 8 * shape[-1])) // 2
  return {'block': size, 'outputs': 'embedding' in end, 'terms': terms}


def _keys(told: Mapping[str, dict], targets: list[str], shapes: Mapping[str, Mapping]) -> Any:
  """One size or one number of blocks, and one transform: PEFT has no others."""
  del targets
  sizes, terms = {f['block'] for f in told.values()}, {f['terms'] for f in told.values()}
  rows = {next(iter(shape.values()))[0] for shape in shapes.values()}
  if len(terms) > 1 or min(len(sizes), len(rows)) > 1:
    return None
  (term,) = terms
  one = {'r': 0, 'oft_block_size': sizes.pop()}
  other = {'r': rows.pop(), 'oft_block_size': 0}
  exact = {'use_cayley_neumann': term > 0, 'num_cayley_neumann_terms': term or 5}
  return (other if sizes else one) | exact


@peftlab.register_adapter('oft')
@dataclasses.dataclass(frozen=True, kw_only=True)
class OFT(peftlab.Adapter):
  """y = (x R) W, R of orthogonal blocks. Trainable: in/block x block (block - 1) / 2 per kernel.

  Attributes:
    block: size of a block; it must divide the rotated side.
    outputs: rotate the outputs instead, y = x W R; this works on embeddings too.
    terms: 0: the exact Cayley transform (I - Q)(I + Q)^-1; n: the first n of its Neumann series of
      -Q, without a solve, as PEFT does with 5. Only near orthogonal.
    one_block: whether all blocks are the same: block (block - 1) / 2 per kernel.

  The variant COFT, which bounds the norm of Q, is not offered: `coft` in a PEFT folder is refused.
  """

  additive = False
  peft = PeftForm(
    type='OFT',
    keys={'one_block': Key(name='block_share', default=False)},
    tensors=(
      Tensor(
        'rotation', 'oft_R.weight', 'n pairs -> n pairs', on=('linear',), when={'outputs': False}
      ),
      Tensor('rotation', 'oft_embedding_R.weight', 'n pairs -> n pairs', on=('embedding',)),
    ),
    fixed={'coft': (False, None)},
    neutral=(
      *('r', 'oft_block_size', 'use_cayley_neumann', 'num_cayley_neumann_terms'),
      *('eps', 'init_weights'),
    ),
    training=('module_dropout',),
    at=_fields,
    more=_keys,
  )

  block: int = 8
  outputs: bool = False
  terms: int = 0
  one_block: bool = False

  def __post_init__(self):
    super().__post_init__()
    if self.block < 2 or self.terms < 0:
      raise ValueError(
        f'OFT has block {self.block} and {self.terms} terms; expected at least 2 and 0.'
      )

  @property
  def embeddings(self):  # pyrefly: ignore[bad-override]
    """The outputs of a lookup can be rotated; its inputs cannot."""
    return self.outputs

  def sizes(self, kernel):
    name = 'out' if self.outputs else 'in'
    if kernel[name] % self.block:
      raise ValueError(
        f'OFT.block is {self.block}; it must divide {name}, which is {kernel[name]}.'
      )
    return {'pairs': self.block * (self.block - 1) // 2}

  def slots(self):
    blocks = '1' if self.one_block else 'out/block' if self.outputs else 'in/block'
    return {'rotation': peftlab.Slot(dims=f'{blocks} pairs')}

  def apply(self, x, base, p):
    blocks = self._blocks(p)
    return (
      rotations.rotated(base(x), blocks) if self.outputs else base(rotations.rotated(x, blocks))
    )

  def fuse(self, w, p):
    blocks = self._blocks(p)
    if self.outputs:
      return rotations.rotated(w, blocks)
    return rotations.rotated(w.T, jnp.swapaxes(blocks, -1, -2)).T

  def _blocks(self, p):
    q = rotations.skew(p.rotation, self.block)
    return rotations.neumann(q, self.terms) if self.terms else rotations.cayley(q)

"""What PEFT 0.21.2 stores for its adapter types -> our types and slots, for zoo_test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
from typing import Any

import numpy as np

from peftlab import Adapter
from peftlab.plugins import (
  adalora,
  bd_lora,
  boft,
  c3a,
  dora,
  eva,
  fourierft,
  full,
  hira,
  ia3,
  loha,
  lokr,
  lora,
  miss,
  oft,
  olora,
  pissa,
  randlora,
  shira,
  trainable_tokens,
  vblora,
  vera,
)

FOLDER = pathlib.Path(__file__).parent.parent / 'goldens' / 'peft_zoo'
PREFIX = 'base_model.model.layer.'
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
  """One golden.

  Attributes:
    adapter: the instance that is the same.
    slots: PEFT's arrays by their short key -> {slot: array}; used for gradients likewise.
    on: the layer.
    fixed: slots that PEFT has no gradient of, or does not store, from the whole file.
    count: trainable numbers.
    start: slots whose first values are the same.
    start_from: slots that keep what PEFT started from.
    wrong: slots whose gradient is wrong in PEFT (see the README of the goldens).
    forward: whether PEFT's own output is the one that its merged weight gives.
  """

  adapter: Adapter
  slots: Callable[[Mapping[str, np.ndarray]], Arrays]
  count: int
  on: str = 'linear'
  fixed: Callable[[Mapping[str, np.ndarray]], Arrays] = lambda g: {}
  start: tuple[str, ...] = ()
  start_from: Callable[[Mapping[str, np.ndarray]], Arrays] | None = None
  wrong: tuple[str, ...] = ()
  forward: bool = True


def _flat(a: np.ndarray) -> np.ndarray:
  """[n, in] or a convolution's [n, in, height, width] -> [(in height width), n]."""
  return a.reshape(a.shape[0], -1).T


def _low_rank(g: Mapping[str, np.ndarray]) -> Arrays:
  a = g.get('lora_A.weight', g.get('lora_embedding_A'))
  b = g.get('lora_B.weight', g.get('lora_embedding_B'))
  assert a is not None
  assert b is not None
  return {'a': _flat(a), 'b': b.reshape(b.shape[:2]).T}


def _kept(g: Mapping[str, np.ndarray]) -> Arrays:
  return {f'{slot}0': array for slot, array in _low_rank(g).items()}


def _dora(g: Mapping[str, np.ndarray]) -> Arrays:
  return _low_rank(g) | {'magnitude': g['lora_magnitude_vector'].reshape(-1)}


def _loha(g: Mapping[str, np.ndarray]) -> Arrays:
  return {f'{ours}{i}': g[f'hada_w{i}_{theirs}'].T for i in '12' for ours, theirs in PAIRS}


PAIRS = (('a', 'b'), ('b', 'a'))


def _loha_effective(g: Mapping[str, np.ndarray]) -> Arrays:
  found = {f'{ours}{i}': g[f'hada_w{i}_{theirs}'] for i in '12' for ours, theirs in PAIRS}
  return {k: a.T if k[0] == 'a' else a for k, a in found.items()} | _cores(
    g, t1='hada_t1', t2='hada_t2'
  )


def _cores(g: Mapping[str, np.ndarray], **names: str) -> Arrays:
  return {slot: g[key].reshape(*g[key].shape[:2], -1) for slot, key in names.items()}


LOKR = {'w1': 'p', 'w1_a': 'p_b', 'w1_b': 'p_a', 'w2': 'q', 'w2_a': 'q_b', 'w2_b': 'q_a'}


def _lokr(g: Mapping[str, np.ndarray]) -> Arrays:
  return {LOKR[k.removeprefix('lokr_')]: _flat(a) for k, a in g.items()}


def _lokr_effective(g: Mapping[str, np.ndarray]) -> Arrays:
  found = {'p': g['lokr_w1'].T, 'q_b': g['lokr_w2_a'], 'q_a': g['lokr_w2_b'].T}
  return found | _cores(g, q_t='lokr_t2')


def _boft(g: Mapping[str, np.ndarray]) -> Arrays:
  return {'rotation': g['boft_R'], 'scale': g['boft_s'].reshape(-1)}


def _adalora(g: Mapping[str, np.ndarray]) -> Arrays:
  return {'a': g['lora_A'].T, 'b': g['lora_B'].T, 'e': g['lora_E'][:, 0]}


def _c3a(g: Mapping[str, np.ndarray]) -> Arrays:
  # PEFT's number (i, j) of a block is w[(j - i) mod b], i of the outputs; ours is the same.
  return {'kernel': g['c3a_kernel'].transpose(1, 0, 2)}


def _vblora(g: Mapping[str, np.ndarray]) -> Arrays:
  found = {'a': g['vblora_logits_A'], 'b': g['vblora_logits_B']}
  return found | {'bank': g['vblora_vector_bank']}


def _of(**names: str) -> Callable[[Mapping[str, np.ndarray]], Arrays]:
  """Slots that are one of PEFT's arrays each, transposed where it is a matrix of two sides."""
  return lambda g: {slot: g[key] for slot, key in names.items()}


def _rows(**names: str) -> Callable[[Mapping[str, np.ndarray]], Arrays]:
  return lambda g: {slot: g[key].reshape(-1) for slot, key in names.items()}


def _blocks_a(g: Mapping[str, np.ndarray]) -> Arrays:
  """A [rank, in / n]: block k is rows k r/n ..; ours is [in, rank / n]."""
  a = g['lora_A.weight']
  blocks = a.reshape(2, a.shape[0] // 2, a.shape[1])
  return {'a': blocks.transpose(0, 2, 1).reshape(-1, a.shape[0] // 2), 'b': g['lora_B.weight'].T}


def _blocks_b(g: Mapping[str, np.ndarray]) -> Arrays:
  b = g['lora_B.weight']
  return {'a': g['lora_A.weight'].T, 'b': b.T}


def _random_bases(g: Mapping[str, np.ndarray]) -> Arrays:
  a, b = g['adapter/base_model.randlora_A'], g['adapter/base_model.randlora_B']
  return {'a': a[:, 0], 'b': b}


CASES: dict[str, Case] = {
  'lora/linear': Case(lora.LoRA(rank=4, alpha=8), _low_rank, 320),
  'lora/conv': Case(lora.LoRA(rank=4, alpha=8), _low_rank, 336, 'conv'),
  'lora/embedding': Case(lora.LoRA(rank=4, alpha=8), _low_rank, 160, 'embedding'),
  'rslora/linear': Case(lora.LoRA(rank=4, alpha=8, rslora=True), _low_rank, 320),
  'dora/linear': Case(dora.DoRA(rank=4, alpha=8), _dora, 352, start=('magnitude',)),
  'dora/linear_rslora': Case(dora.DoRA(rank=4, alpha=8, rslora=True), _dora, 352),
  'dora/conv': Case(dora.DoRA(rank=4, alpha=8), _dora, 348, 'conv', start=('magnitude',)),
  'dora/embedding': Case(dora.DoRA(rank=4, alpha=8), _dora, 176, 'embedding'),
  'ia3/linear': Case(ia3.IA3(), _rows(factor='ia3_l'), 32, start=('factor',)),
  'ia3/linear_feedforward': Case(ia3.IA3(feedforward=True), _rows(factor='ia3_l'), 48),
  'ia3/conv_feedforward': Case(
    ia3.IA3(feedforward=True), _rows(factor='ia3_l'), 8, 'conv', start=('factor',)
  ),
  'ia3/conv': Case(ia3.IA3(), _rows(factor='ia3_l'), 12, 'conv'),
  'oft/linear': Case(oft.OFT(terms=5), _of(rotation='oft_R.weight'), 168),
  'oft/linear_cayley': Case(oft.OFT(), _of(rotation='oft_R.weight'), 168, start=('rotation',)),
  'oft/linear_block_share': Case(
    oft.OFT(terms=5, one_block=True), _of(rotation='oft_R.weight'), 28
  ),
  'oft/embedding': Case(
    oft.OFT(terms=5, outputs=True), _of(rotation='oft_embedding_R.weight'), 56, 'embedding'
  ),
  # Only its merged weight: in the forward pass PEFT sums rotated patches where they overlap.
  'oft/conv': Case(oft.OFT(terms=5), _of(rotation='oft_R.weight'), 252, 'conv', forward=False),
  'oft/conv_1x1': Case(oft.OFT(terms=5), _of(rotation='oft_R.weight'), 28, 'conv_1x1'),
  'boft/linear': Case(boft.BOFT(), _boft, 224),
  'boft/linear_2_factors': Case(boft.BOFT(factors=2), _boft, 416),
  'boft/conv': Case(boft.BOFT(), _boft, 300, 'conv', start=('rotation', 'scale')),
  'loha/linear': Case(loha.LoHa(rank=4, alpha=8), _loha, 640, start=('a2',)),
  'loha/conv': Case(loha.LoHa(rank=4, alpha=8), _loha, 672, 'conv', start=('a2',)),
  'loha/conv_effective': Case(
    loha.LoHa(rank=4, alpha=8, effective=True),
    _loha_effective,
    448,
    'conv',
    start=('a2',),
    wrong=('b1', 'b2'),
  ),
  'lokr/linear': Case(lokr.LoKr(rank=4, alpha=8), _lokr, 88, start=('p',)),
  'lokr/conv': Case(lokr.LoKr(rank=4, alpha=8), _lokr, 150, 'conv', start=('p',)),
  'lokr/conv_r1': Case(lokr.LoKr(rank=1, alpha=2), _lokr, 46, 'conv', start=('p',)),
  'lokr/conv_effective': Case(
    lokr.LoKr(rank=1, alpha=2, effective=True), _lokr_effective, 23, 'conv', start=('p',)
  ),
  'lokr/linear_r2': Case(lokr.LoKr(rank=2, alpha=8), _lokr, 56),
  'lokr/linear_both': Case(lokr.LoKr(rank=2, alpha=8, both=True), _lokr, 52),
  'lokr/linear_factor': Case(lokr.LoKr(rank=2, alpha=8, factor=4), _lokr, 56),
  'miss/linear': Case(miss.MiSS(rank=4), _of(shared_rows='miss_block'), 128),
  'miss/linear_r5': Case(miss.MiSS(rank=5), _of(shared_rows='miss_block'), 160),
  'hira/linear': Case(
    hira.HiRA(rank=4), lambda g: {'a': g['hira_A'].T, 'b': g['hira_B'].T}, 320, start=('b',)
  ),
  'hira/embedding': Case(
    hira.HiRA(rank=4),
    lambda g: {'a': g['hira_embedding_A'].T, 'b': g['hira_embedding_B'].T},
    160,
    'embedding',
  ),
  'hira/conv': Case(
    hira.HiRA(rank=4),
    lambda g: {'a': _flat(g['hira_A']), 'b': g['hira_B'].reshape(g['hira_B'].shape[:2]).T},
    336,
    'conv',
  ),
  'shira/linear': Case(
    shira.SHiRA(rank=4),
    _of(numbers='shira_weight'),
    320,
    fixed=lambda g: {'places': g[f'adapter/{PREFIX}shira_indices'][::-1]},
  ),
  'fourierft/linear': Case(
    fourierft.FourierFT(entries=20),
    _of(spectrum='fourierft_spectrum'),
    20,
    fixed=lambda g: {'places': g['indices'][::-1]},
  ),
  'c3a/linear': Case(c3a.C3A(), _c3a, 192, start=('kernel',)),
  'c3a/linear_default': Case(c3a.C3A(), _c3a, 192),
  'randlora/linear': Case(
    randlora.RandLoRA(rank=4, alpha=8),
    _of(scales='randlora_lambda', gamma='randlora_gamma'),
    288,
    fixed=_random_bases,
    start=('scales', 'gamma'),
  ),
  'randlora/tall': Case(
    randlora.RandLoRA(rank=5, alpha=8),
    _of(scales='randlora_lambda', gamma='randlora_gamma'),
    259,
    'tall',
    fixed=_random_bases,
  ),
  'vera/linear': Case(
    vera.VeRA(rank=4),
    _of(b='vera_lambda_b', d='vera_lambda_d'),
    36,
    fixed=lambda g: {
      'shared_a': g['adapter/base_model.vera_A'].T,
      'shared_b': g['adapter/base_model.vera_B'].T,
    },
    start=('b', 'd'),
  ),
  'vblora/linear': Case(vblora.VBLoRA(vectors=10, length=8), _vblora, 480),
  'adalora/linear': Case(adalora.AdaLoRA(rank=4, alpha=8), _adalora, 324, start=('e',)),
  'adalora/conv': Case(
    adalora.AdaLoRA(rank=4, alpha=8),
    _adalora,
    340,
    'conv',
    start=('e',),
  ),
  'pissa/linear': Case(pissa.PiSSA(rank=4, alpha=8), _low_rank, 320, start_from=_kept),
  'pissa/linear_rslora': Case(
    pissa.PiSSA(rank=4, alpha=8, rslora=True), _low_rank, 320, start_from=_kept
  ),
  'olora/linear': Case(olora.OLoRA(rank=4, alpha=8), _low_rank, 320, start_from=_kept),
  'eva/linear': Case(eva.EVA(rank=4, alpha=8), _low_rank, 320),
  'bd_lora/linear_a': Case(bd_lora.BDLoRA(rank=4, alpha=8, blocks=2, side='in'), _blocks_a, 224),
  'bd_lora/linear_b': Case(bd_lora.BDLoRA(rank=4, alpha=8, blocks=2), _blocks_b, 256),
  'trainable_tokens/embedding': Case(
    trainable_tokens.TrainableTokens(tokens=(7, 1, 5)),
    _of(rows='trainable_tokens_delta'),
    48,
    'embedding',
    start=('rows',),
  ),
  'ln_tuning/norm': Case(
    full.Full(),
    lambda g: {
      'weight': g['ln_tuning_layers.weight'][None],
      'bias': g['ln_tuning_layers.bias'],
    },
    96,
    'norm',
    start=('weight', 'bias'),
  ),
}


def golden(name: str) -> dict[str, Any]:
  """The arrays of a case by key, and of its plain layer under 'base/KEY'."""
  with np.load(FOLDER / f'{name}.npz') as file:
    found = dict(file)
  on = CASES[name].on if name in CASES else 'linear'
  with np.load(FOLDER / 'base' / f'{on}.npz') as file:
    return found | {f'base/{key}': array for key, array in file.items()}


def short(arrays: Mapping[str, np.ndarray], group: str) -> dict[str, np.ndarray]:
  """The arrays of a group ('adapter', 'start', 'grad') by the end of their key."""
  found = {}
  for key, array in arrays.items():
    if key.startswith(f'{group}/base_model.'):
      name = key.removeprefix(f'{group}/base_model.').removeprefix('model.layer.')
      found[name] = array
  return found

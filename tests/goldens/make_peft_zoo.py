"""Writes peft_zoo/: every adapter type of PEFT on one layer and on a tiny Llama, and merges of two.

  pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2   (Python 3.11, CPU)
  python -m tests.goldens.make_peft_zoo tests/goldens/peft_zoo     (from the top of the checkout)

peft_zoo/README.md says what lies there, with the formula of each type. Every array is float32 and
random but for fixed parts; what is computed from them is computed in float64 where PEFT allows it.
A second run writes the same bytes.
"""

from collections.abc import Callable
import copy
import dataclasses
import os
import pathlib
import sys
import types
from typing import Any
import warnings

os.environ['HF_HUB_OFFLINE'] = '1'  # set before the hub's client is imported: nothing is asked

import numpy as np
import peft
from peft.tuners.boft import layer as boft_layer
import torch
import transformers

from tests.goldens import peft_zoo_llama, peft_zoo_merges
from tests.goldens.peft_zoo_arrays import (
  as_numpy,
  config_of,
  count,
  random,
  save_arrays,
  save_json,
  seed_of,
  train,
  trainables,
)

# The counts that the project states for Linear(48 -> 32), r=4.
STATED = {
  'lora': 320, 'dora': 352, 'vera': 36, 'ia3': 32, 'loha': 640, 'lokr': 88, 'oft': 168,
  'boft': 224, 'randlora': 288, 'shira': 320, 'hira': 320, 'miss': 128, 'c3a': 192,
  'adalora': 324, 'fourierft': 20,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One adapter on one kind of layer."""

  config: peft.PeftConfig
  on: str = 'linear'
  std: float = 0.3
  near_start: bool = False  # a start made from the weight or from data: trained = start + noise
  prepare: Callable[[torch.nn.Module, torch.Tensor], Any] | None = None
  call: dict[str, Any] = dataclasses.field(default_factory=dict)
  merges: bool = True
  extra: Callable[[torch.nn.Module], dict[str, Any]] = lambda layer: {}


def on(config: type, **fields: Any) -> peft.PeftConfig:
  return config(**{'target_modules': ['layer'], **fields})


def lora(**fields: Any) -> peft.LoraConfig:
  return on(peft.LoraConfig, **{'r': 4, 'lora_alpha': 8, **fields})


def adalora(**fields: Any) -> peft.AdaLoraConfig:
  usual = {'init_r': 4, 'target_r': 2, 'lora_alpha': 8, 'total_step': 12, 'tinit': 2, 'tfinal': 3}
  return on(peft.AdaLoraConfig, **{**usual, 'deltaT': 2, **fields})


def ranknum(layer: torch.nn.Module) -> dict[str, Any]:
  return {'ranknum': layer.ranknum['default'].numpy()}


def from_inputs(model: torch.nn.Module, x: torch.Tensor) -> None:
  """EVA's start from one batch."""
  peft.initialize_lora_eva_weights(
    model,
    [{'x': x}],
    forward_fn=lambda model, batch: model(batch['x']),
    prepare_model_inputs_fn=None,
    prepare_layer_inputs_fn=None,
    show_progress_bar=False,
  )


def lora_cases() -> dict[str, Case]:
  bd = peft.tuners.lora.BdLoraConfig
  eva = peft.EvaConfig(rho=1.0)
  return {
    'lora/linear': Case(config=lora()),
    'lora/linear_lora_bias': Case(config=lora(lora_bias=True)),
    'lora/linear_bias_lora_only': Case(config=lora(bias='lora_only')),
    'lora/head_modules_to_save': Case(config=lora(modules_to_save=['head']), on='head'),
    'lora/embedding': Case(config=lora(), on='embedding'),
    'lora/conv': Case(config=lora(), on='conv'),
    'rslora/linear': Case(config=lora(use_rslora=True)),
    'rslora/embedding': Case(config=lora(use_rslora=True), on='embedding'),
    'dora/linear': Case(config=lora(use_dora=True)),
    'dora/linear_rslora': Case(config=lora(use_dora=True, use_rslora=True)),
    'dora/embedding': Case(config=lora(use_dora=True), on='embedding'),
    'dora/conv': Case(config=lora(use_dora=True), on='conv'),
    'pissa/linear': Case(config=lora(init_lora_weights='pissa'), near_start=True),
    'pissa/linear_rslora': Case(
      config=lora(init_lora_weights='pissa', use_rslora=True), near_start=True
    ),
    'olora/linear': Case(config=lora(init_lora_weights='olora'), near_start=True),
    'eva/linear': Case(
      config=lora(init_lora_weights='eva', eva_config=eva),
      near_start=True,
      prepare=from_inputs,
    ),
    'alora/linear': Case(
      config=lora(alora_invocation_tokens=[7, 3]),
      call={'alora_offsets': [2, None]},
      merges=False,
    ),
    'bd_lora/linear_a': Case(config=lora(use_bdlora=bd(['layer'], None, nblocks=2))),
    'bd_lora/linear_b': Case(config=lora(use_bdlora=bd(None, ['layer'], nblocks=2))),
  }


def scaling_and_rotating_cases() -> dict[str, Case]:
  oft = {'oft_block_size': 8}
  return {
    'vera/linear': Case(config=on(peft.VeraConfig, r=4)),
    'vblora/linear': Case(
      config=on(peft.VBLoRAConfig, r=4, num_vectors=10, vector_length=8, topk=2), std=1.0
    ),
    'ia3/linear': Case(config=on(peft.IA3Config, feedforward_modules=[])),
    'ia3/linear_feedforward': Case(config=on(peft.IA3Config, feedforward_modules=['layer'])),
    'ia3/conv': Case(config=on(peft.IA3Config, feedforward_modules=[]), on='conv'),
    'ia3/conv_feedforward': Case(
      config=on(peft.IA3Config, feedforward_modules=['layer']), on='conv'
    ),
    'oft/linear': Case(config=on(peft.OFTConfig, **oft), std=0.1),
    'oft/linear_cayley': Case(config=on(peft.OFTConfig, **oft, use_cayley_neumann=False)),
    'oft/linear_coft': Case(config=on(peft.OFTConfig, **oft, coft=True, eps=0.5), std=0.1),
    'oft/linear_block_share': Case(config=on(peft.OFTConfig, **oft, block_share=True), std=0.1),
    'oft/embedding': Case(config=on(peft.OFTConfig, **oft), std=0.1, on='embedding'),
    'oft/conv': Case(config=on(peft.OFTConfig, **oft), std=0.1, on='conv'),
    'oft/conv_1x1': Case(config=on(peft.OFTConfig, **oft), std=0.1, on='conv_1x1'),
    'boft/linear': Case(config=on(peft.BOFTConfig, boft_block_size=4)),
    'boft/linear_2_factors': Case(
      config=on(peft.BOFTConfig, boft_block_size=4, boft_n_butterfly_factor=2)
    ),
    'boft/conv': Case(config=on(peft.BOFTConfig, boft_block_size=4), on='conv'),
  }


def other_cases() -> dict[str, Case]:
  return {
    'loha/linear': Case(config=on(peft.LoHaConfig, r=4, alpha=8)),
    'loha/conv': Case(config=on(peft.LoHaConfig, r=4, alpha=8), on='conv'),
    'loha/conv_effective': Case(
      config=on(peft.LoHaConfig, r=4, alpha=8, use_effective_conv2d=True), on='conv'
    ),
    'lokr/linear': Case(config=on(peft.LoKrConfig, r=4, alpha=8)),
    'lokr/linear_r2': Case(config=on(peft.LoKrConfig, r=2, alpha=8)),
    'lokr/linear_both': Case(config=on(peft.LoKrConfig, r=2, alpha=8, decompose_both=True)),
    'lokr/linear_factor': Case(config=on(peft.LoKrConfig, r=2, alpha=8, decompose_factor=4)),
    'lokr/conv': Case(config=on(peft.LoKrConfig, r=4, alpha=8), on='conv'),
    'lokr/conv_r1': Case(config=on(peft.LoKrConfig, r=1, alpha=2), on='conv'),
    'lokr/conv_effective': Case(
      config=on(peft.LoKrConfig, r=1, alpha=2, use_effective_conv2d=True), on='conv'
    ),
    'adalora/linear': Case(config=adalora(), extra=ranknum),
    'adalora/conv': Case(config=adalora(), on='conv', extra=ranknum),
    'miss/linear': Case(config=on(peft.MissConfig, r=4)),
    'miss/linear_r5': Case(config=on(peft.MissConfig, r=5)),
    'miss/linear_bat': Case(config=on(peft.MissConfig, r=4, init_weights='bat')),
    'miss/linear_mini': Case(config=on(peft.MissConfig, r=4, init_weights='mini', mini_r=8)),
    'randlora/linear': Case(config=on(peft.RandLoraConfig, r=4, randlora_alpha=8)),
    'randlora/tall': Case(config=on(peft.RandLoraConfig, r=5, randlora_alpha=8), on='tall'),
    'shira/linear': Case(config=on(peft.ShiraConfig, r=4, random_seed=0)),
    'hira/linear': Case(config=on(peft.HiraConfig, r=4)),
    'hira/embedding': Case(config=on(peft.HiraConfig, r=4), on='embedding'),
    'hira/conv': Case(config=on(peft.HiraConfig, r=4), on='conv'),
    'fourierft/linear': Case(
      config=on(peft.FourierFTConfig, n_frequency=20, init_weights=True),
      std=1.0,
      extra=lambda layer: {'indices': layer.indices['default'].numpy()},
    ),
    'c3a/linear': Case(config=on(peft.C3AConfig, block_size=8, init_weights=True), std=3.0),
    'c3a/linear_default': Case(config=on(peft.C3AConfig, block_size=8), std=3.0),
    'trainable_tokens/embedding': Case(
      config=on(peft.TrainableTokensConfig, token_indices=[7, 1, 5]), on='embedding'
    ),
    'ln_tuning/norm': Case(config=on(peft.LNTuningConfig), on='norm'),
  }


class One(torch.nn.Module):
  """A model of one layer, or of a layer and a head."""

  def __init__(self, layer: torch.nn.Module, head: torch.nn.Module | None = None):
    super().__init__()
    self.layer = layer
    if head is not None:
      self.head = head

  def forward(self, x, **call):
    y = self.layer(x, **call)
    return self.head(y) if hasattr(self, 'head') else y


def bases() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
  """A model and an input for each kind of layer."""
  nn = torch.nn
  conv = {'stride': 2, 'padding': 1}
  tokens = np.random.default_rng(1).integers(0, 24, (2, 5))
  tokens[:, :3] = 7, 1, 5
  models = {
    'linear': (One(nn.Linear(48, 32)), (2, 3, 48)),
    'tall': (One(nn.Linear(32, 48)), (2, 3, 32)),
    'head': (One(nn.Linear(48, 32), nn.Linear(32, 8)), (2, 3, 48)),
    'embedding': (One(nn.Embedding(24, 16)), None),
    'conv': (One(nn.Conv2d(8, 12, 3, **conv)), (2, 8, 5, 5)),
    'conv_1x1': (One(nn.Conv2d(8, 12, 1)), (2, 8, 3, 3)),
    'norm': (One(nn.LayerNorm(48)), (2, 3, 48)),
  }
  for kind, (model, _) in models.items():
    for key, value in model.named_parameters():
      mean = 1.0 if kind == 'norm' and key.endswith('weight') else 0.0
      value.data = mean + random(f'{kind} {key}', tuple(value.shape), 0.3)
  inputs = {kind: random(f'{kind} input', shape) for kind, (_, shape) in models.items() if shape}
  # Few directions of falling size, so that a randomized SVD of it is exact.
  inputs['linear'] = inputs['head'] = _of_low_rank(inputs['linear'])
  inputs['embedding'] = torch.from_numpy(tokens)
  return {kind: (model, inputs[kind]) for kind, (model, _) in models.items()}


def _of_low_rank(x: torch.Tensor) -> torch.Tensor:
  u, s, v = np.linalg.svd(x.double().numpy().reshape(-1, x.shape[-1]), full_matrices=False)
  return torch.from_numpy(((u * s[0] * 0.7 ** np.arange(len(s))) @ v).reshape(x.shape)).float()


def butterfly_on_cpu() -> None:
  """PEFT has several butterfly factors with a CUDA kernel only, and without it silently takes 1."""

  def blocks(x):
    return torch.stack([torch.block_diag(*factor) for factor in x])

  boft_layer.get_fbd_cuda = lambda: True
  boft_layer.FastBlockDiag = types.SimpleNamespace(apply=blocks)


def plain_weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
  return {k: v.detach().double().numpy().copy() for k, v in model.state_dict().items()}


def run_layer(name: str, case: Case, root: pathlib.Path) -> dict[str, Any]:
  """Writes one case; what is true of it goes to cases.json."""
  model, x = bases()[case.on]
  base = plain_weights(model)
  x_double = x.double() if x.is_floating_point() else x
  y_base = copy.deepcopy(model).double()(x_double)
  torch.manual_seed(seed_of(name))
  model = peft.get_peft_model(model, case.config).eval()
  if case.prepare:
    case.prepare(model, x)
  number = count(model)
  arrays = {f'start/{k}': as_numpy(v).copy() for k, v in trainables(model).items()}
  inner = model.base_model.model
  held = {k.replace('.base_layer', ''): v for k, v in plain_weights(inner).items()}
  arrays |= {f'residual/{k}': held[k] for k in base if k in held and (held[k] != base[k]).any()}
  y_start = model.double()(x_double, **case.call)
  train(model.float(), name, case.std, case.near_start)
  stored = peft.get_peft_model_state_dict(model)
  arrays |= {f'adapter/{k}': as_numpy(v).copy() for k, v in stored.items()}
  y = model.double()(x_double, **case.call)
  (y * random(f'{case.on} cotangent', tuple(y.shape))).sum().backward()
  arrays |= {f'grad/{k}': v.grad for k, v in trainables(model).items()}
  arrays |= {'output': y, 'start_output': y_start, **case.extra(inner.layer)}
  gap = None
  if case.merges:
    merged = model.merge_and_unload()
    gap = float((merged(x_double) - y).abs().max())
    found = plain_weights(merged)
    arrays |= {f'delta/{k}': found[k] - base[k] for k in base if (found[k] != base[k]).any()}
  save_arrays(root / f'{name}.npz', arrays)
  save_json(root / f'{name}.json', config_of(case.config))
  moved = float((y - y_base).abs().max())
  assert moved > 1e-2, (name, moved)
  if name.endswith('/linear'):
    kind = name.split('/')[0]
    assert number == STATED.get(kind, number), (name, number)
  return {
    'on': case.on,
    'trainable': number,
    'identity_at_start': float((y_start - y_base).abs().max()) < 1e-5,
    'mergeable': case.merges,
    'merged_equals_applied': None if gap is None else gap < 1e-5,
  }


def write_bases(root: pathlib.Path) -> None:
  for kind, (model, x) in bases().items():
    y = model.double()(x.double() if x.is_floating_point() else x)
    cotangent = random(f'{kind} cotangent', tuple(y.shape))
    arrays = {'input': x, 'output': y, 'cotangent': cotangent, **plain_weights(model)}
    save_arrays(root / 'base' / f'{kind}.npz', arrays)


def main(output: str) -> None:
  warnings.simplefilter('ignore')
  transformers.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(1)
  root = pathlib.Path(output)
  write_bases(root)
  facts = peft_zoo_llama.write(root, pathlib.Path(__file__).parent / 'peft_lora' / 'base')
  butterfly_on_cpu()
  for name, case in {**lora_cases(), **scaling_and_rotating_cases(), **other_cases()}.items():
    facts[name] = run_layer(name, case, root)
    print(name, facts[name])
  peft_zoo_merges.write(root)
  save_json(root / 'cases.json', facts)


if __name__ == '__main__':
  main(sys.argv[1])

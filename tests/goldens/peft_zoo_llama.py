"""The part of peft_zoo on a tiny Llama: a folder saved by PEFT for each case, and its logits."""

from collections.abc import Callable
import dataclasses
import json
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
import peft
import torch
import transformers

from tests.goldens.peft_zoo_arrays import (
  as_numpy,
  count,
  in_order,
  random,
  save_arrays,
  seed_of,
  train,
  trainables,
)

INVOCATION = [7, 3]
MLP = ['gate_proj', 'up_proj', 'down_proj']
Prepare = Callable[[peft.PeftModel, torch.Tensor], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One adapter on the Llama."""

  config: peft.PeftConfig
  std: float = 0.3
  near_start: bool = False  # a start made from the weight or from data: trained = start + noise
  prepare: Prepare | None = None  # before training
  finish: Prepare | None = None  # after training
  as_lora: bool = False  # saved as what it adds to the base as it was


def lora(**fields: Any) -> peft.LoraConfig:
  usual = {'r': 4, 'lora_alpha': 8, 'target_modules': ['q_proj', 'v_proj', 'down_proj']}
  return peft.LoraConfig(task_type='CAUSAL_LM', **{**usual, **fields})


def of(config: type, **fields: Any) -> peft.PeftConfig:
  usual = {'target_modules': ['q_proj', 'down_proj']}
  return config(task_type='CAUSAL_LM', **{**usual, **fields})


def prompt(config: type, **fields: Any) -> peft.PeftConfig:
  return config(task_type='CAUSAL_LM', num_virtual_tokens=3, **fields)


def eva_start(model: peft.PeftModel, tokens: torch.Tensor) -> None:
  peft.initialize_lora_eva_weights(model, [{'input_ids': tokens}], show_progress_bar=False)


def allocate(model: peft.PeftModel, tokens: torch.Tensor) -> None:
  """AdaLoRA's pruning by the importance of four steps."""
  for step in range(model.peft_config['default'].total_step):
    model.zero_grad()
    model(input_ids=tokens).logits.square().sum().backward()
    model.base_model.update_and_allocate(step)
  model.zero_grad()


def lora_cases() -> dict[str, Case]:
  bd = peft.tuners.lora.BdLoraConfig(['o_proj', 'down_proj'], ['q_proj', 'up_proj'], nblocks=2)
  six = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj']
  ranks = {'v_proj': 2, 'layers.0.mlp.up_proj': 3}
  alphas = {r'.*\.1\.self_attn\.v_proj': 5, 'up_proj': 6}
  quv = ['q_proj', 'up_proj', 'v_proj']
  return {
    'lora/list_modules_to_save': Case(config=lora(modules_to_save=['lm_head'])),
    'lora/regex': Case(config=lora(target_modules=r'.*\.1\.(self_attn\.[qk]_proj|mlp\.down_proj)')),
    'lora/all_linear': Case(config=lora(r=2, target_modules='all-linear')),
    'lora/layers': Case(config=lora(layers_to_transform=[1], layers_pattern='layers')),
    'lora/exclude': Case(config=lora(exclude_modules=r'.*layers\.0\.self_attn.*')),
    'lora/patterns': Case(
      config=lora(target_modules=quv, rank_pattern=ranks, alpha_pattern=alphas)
    ),
    'lora/tokens': Case(config=lora(trainable_token_indices=[30, 3, 7])),
    'lora/embedding_and_head': Case(config=lora(target_modules=['embed_tokens', 'lm_head'])),
    'rslora/patterns': Case(
      config=lora(use_rslora=True, target_modules=quv, rank_pattern=ranks, alpha_pattern=alphas)
    ),
    'dora/list': Case(config=lora(use_dora=True, alpha_pattern={'v_proj': 3})),
    'dora/embedding': Case(config=lora(use_dora=True, target_modules=['embed_tokens'])),
    'pissa/raw': Case(config=lora(init_lora_weights='pissa'), near_start=True, std=0.1),
    'pissa/as_lora': Case(
      config=lora(init_lora_weights='pissa'), near_start=True, std=0.1, as_lora=True
    ),
    'olora/as_lora': Case(
      config=lora(init_lora_weights='olora'), near_start=True, std=0.1, as_lora=True
    ),
    'eva/allocated': Case(
      config=lora(init_lora_weights='eva', eva_config=peft.EvaConfig(rho=2.0), target_modules=six),
      near_start=True,
      prepare=eva_start,
    ),
    'alora/list': Case(config=lora(alora_invocation_tokens=INVOCATION)),
    'bd_lora/list': Case(
      config=lora(use_bdlora=bd, target_modules=['q_proj', 'o_proj', 'up_proj', 'down_proj'])
    ),
  }


def scaling_and_product_cases() -> dict[str, Case]:
  quv = ['q_proj', 'up_proj', 'v_proj']
  vb = {'r': 4, 'num_vectors': 10, 'vector_length': 8, 'topk': 2}
  return {
    'ia3/list': Case(
      config=of(
        peft.IA3Config,
        target_modules=['k_proj', 'v_proj', 'down_proj'],
        feedforward_modules=['down_proj'],
      )
    ),
    'ia3/regex_modules_to_save': Case(
      config=of(
        peft.IA3Config,
        target_modules=r'.*\.(k_proj|v_proj|down_proj)',
        feedforward_modules=r'.*\.down_proj',
        modules_to_save=['lm_head'],
      )
    ),
    'vera/all_linear': Case(config=of(peft.VeraConfig, r=4, target_modules='all-linear')),
    'vera/layers': Case(config=of(peft.VeraConfig, r=4, layers_to_transform=[0])),
    'vblora/list': Case(config=of(peft.VBLoRAConfig, **vb), std=1.0),
    'vblora/top_k': Case(config=of(peft.VBLoRAConfig, **vb, save_only_topk_weights=True), std=1.0),
    'loha/patterns': Case(
      config=of(
        peft.LoHaConfig,
        r=4,
        alpha=8,
        target_modules=quv,
        rank_pattern={'v_proj': 2},
        alpha_pattern={'layers.0.mlp.up_proj': 3},
      )
    ),
    'loha/regex': Case(
      config=of(peft.LoHaConfig, r=2, alpha=4, target_modules=r'.*\.1\..*(q|down)_proj')
    ),
    'lokr/patterns': Case(
      config=of(
        peft.LoKrConfig,
        r=1,
        alpha=2,
        target_modules=quv,
        rank_pattern={'up_proj': 4},
        alpha_pattern={'v_proj': 3},
      )
    ),
    'lokr/both': Case(
      config=of(peft.LoKrConfig, r=1, alpha=2, decompose_both=True, layers_to_transform=[1])
    ),
  }


def other_cases() -> dict[str, Case]:
  ada = {'init_r': 4, 'target_r': 2, 'lora_alpha': 8, 'total_step': 4, 'tfinal': 1}
  norms = ['input_layernorm', 'post_attention_layernorm', 'model.norm']
  return {
    'oft/list_modules_to_save': Case(
      config=of(peft.OFTConfig, oft_block_size=8, modules_to_save=['lm_head']), std=0.1
    ),
    'oft/layers_cayley': Case(
      config=of(
        peft.OFTConfig, r=2, oft_block_size=0, use_cayley_neumann=False, layers_to_transform=[0]
      )
    ),
    'boft/list': Case(config=of(peft.BOFTConfig, boft_block_size=4)),
    'adalora/list': Case(config=of(peft.AdaLoraConfig, **ada, modules_to_save=['lm_head'])),
    'adalora/allocated': Case(config=of(peft.AdaLoraConfig, **ada), finish=allocate),
    'miss/list': Case(config=of(peft.MissConfig, r=4)),
    'randlora/list': Case(config=of(peft.RandLoraConfig, r=4, randlora_alpha=8)),
    'shira/list': Case(config=of(peft.ShiraConfig, r=2, random_seed=0)),
    'hira/list': Case(config=of(peft.HiraConfig, r=4)),
    'fourierft/list': Case(
      config=of(peft.FourierFTConfig, n_frequency=20, scaling=100.0, init_weights=True), std=1.0
    ),
    'c3a/list': Case(config=of(peft.C3AConfig, block_size=8), std=3.0),
    'ln_tuning/norms': Case(config=of(peft.LNTuningConfig, target_modules=norms)),
    'trainable_tokens/list': Case(
      config=of(
        peft.TrainableTokensConfig, token_indices=[30, 3, 7], target_modules=['embed_tokens']
      )
    ),
    'prompt/random': Case(config=prompt(peft.PromptTuningConfig)),
    'prefix/plain': Case(config=prompt(peft.PrefixTuningConfig)),
    'prefix/projection': Case(
      config=prompt(peft.PrefixTuningConfig, prefix_projection=True, encoder_hidden_size=6)
    ),
    'p_tuning/mlp': Case(config=prompt(peft.PromptEncoderConfig, encoder_hidden_size=6)),
    'p_tuning/lstm': Case(
      config=prompt(
        peft.PromptEncoderConfig, encoder_hidden_size=3, encoder_reparameterization_type='LSTM'
      )
    ),
  }


def save(model: peft.PeftModel, case: Case, initial: pathlib.Path, folder: pathlib.Path) -> None:
  """PEFT's own folder, without its README, the lists of its config in order."""
  model.peft_config['default'].base_model_name_or_path = 'tiny-random-llama'
  more = {'path_initial_model_for_weight_conversion': str(initial)} if case.as_lora else {}
  model.save_pretrained(str(folder), **more)
  (folder / 'README.md').unlink()
  config = folder / 'adapter_config.json'
  fields = in_order(json.loads(config.read_text()))
  config.write_text(json.dumps(fields, indent=2, sort_keys=True))


def run(name: str, case: Case, load: Callable[[], Any], root: pathlib.Path) -> dict[str, Any]:
  """Writes the folder of one case; returns what its type's logits.npz and cases.json hold of it."""
  tokens = torch.from_numpy(tokens_of(name))
  torch.manual_seed(seed_of(name))
  model = peft.get_peft_model(load(), case.config).eval()
  if case.prepare:
    case.prepare(model, tokens)
  number = count(model)
  with tempfile.TemporaryDirectory() as initial:
    if case.as_lora:  # PEFT wants the start saved as a plain LoRA, next to its config
      model.peft_config['default'].init_lora_weights = True
      model.save_pretrained(f'{initial}/start')
      model.peft_config['default'].init_lora_weights = case.config.init_lora_weights
    start = {k: as_numpy(v).copy() for k, v in trainables(model).items()}
    train(model, name, case.std, case.near_start)
    if case.finish:
      case.finish(model, tokens)
    save(model, case, pathlib.Path(initial) / 'start', root / name)
  model = model.double()
  logits = model(input_ids=tokens).logits
  again = peft.PeftModel.from_pretrained(load(), str(root / name)).double().eval()
  gap = (again(input_ids=tokens).logits - logits).abs().max()
  assert gap < 1e-4, (name, float(gap))
  base = load().double()(input_ids=tokens).logits
  moved = (logits[:, -base.shape[1] :] - base).abs().max()
  assert moved > 1e-2, (name, float(moved))
  if case.config.is_prompt_learning:
    save_prompt_learning(name, model, logits, root)
  if case.prepare:
    save_arrays(root / f'{name}_start.npz', start)
  return {'logits': logits, 'trainable': number, 'tokens': tokens}


def save_prompt_learning(
  name: str, model: peft.PeftModel, logits: torch.Tensor, root: pathlib.Path
) -> None:
  """What the folder lacks: the encoder's arrays, and gradients of sum(logits * cotangent)."""
  (logits * random('llama cotangent', (2, 15, 40))[:, : logits.shape[1]]).sum().backward()
  arrays = {f'encoder/{k}': v for k, v in trainables(model).items()}
  grads = {f'grad/{k}': v.grad for k, v in trainables(model).items()}
  prompts = {'prompts': model.get_prompt_embedding_to_save('default')}
  save_arrays(root / f'{name}_encoder.npz', {**arrays, **grads, **prompts})


def tokens_of(name: str) -> np.ndarray:
  """[2, 12] tokens; aLoRA's invocation stands twice in the first row and nowhere in the second."""
  tokens = np.random.default_rng(0).integers(0, 40, (2, 12))
  if name.startswith('alora'):
    tokens[0, 2:4] = tokens[0, 6:8] = INVOCATION
  return tokens


def write(root: pathlib.Path, base: pathlib.Path) -> dict[str, Any]:
  """Writes every folder; returns the facts of each for cases.json."""

  def load() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

  tokens = torch.from_numpy(tokens_of(''))
  cotangent = random('llama cotangent', (2, 15, 40))
  arrays = {'tokens': tokens, 'logits': load().double()(input_ids=tokens).logits}
  save_arrays(root / 'base' / 'llama.npz', {**arrays, 'cotangent': cotangent})
  facts, logits = {}, {}
  cases = {**lora_cases(), **scaling_and_product_cases(), **other_cases()}
  for name, case in cases.items():
    kind, label = name.split('/')
    shutil.rmtree(root / name, ignore_errors=True)
    found = run(name, case, load, root)
    facts[name] = {'on': 'llama', 'trainable': found['trainable']}
    logits.setdefault(kind, {})[label] = found['logits']
    if kind == 'alora':
      logits[kind]['tokens'] = found['tokens']
    print(name, facts[name])
  for kind, held in logits.items():
    save_arrays(root / kind / 'logits.npz', held)
  return facts

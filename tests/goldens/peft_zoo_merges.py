"""The part of peft_zoo beside single adapters: weighted merges, AdaLoRA's schedule, LoftQ's start.

What PEFT computes on factors is computed here on deltas, in float64, beside PEFT's own result.
"""

import pathlib
import types
from typing import Any

import numpy as np
import peft
import torch

from tests.goldens.peft_zoo_arrays import random, save_arrays, save_json, trainables

Array = np.ndarray
WEIGHTS = (0.7, -0.3)
# The codes of 4-bit NormalFloat (Dettmers et al. 2023, QLoRA, appendix E).
NF4 = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
  -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
  0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
  0.7229568362236023, 1.0,
)  # fmt: skip


def prune(delta: Array, density: float) -> Array:
  """Keeps the int(density * size) entries of largest magnitude."""
  keep = np.argsort(-np.abs(delta).ravel(), kind='stable')[: int(density * delta.size)]
  mask = np.zeros(delta.size)
  mask[keep] = 1
  return delta * mask.reshape(delta.shape)


def linear(deltas: list[Array], weights: tuple[float, ...]) -> Array:
  return sum(w * d for w, d in zip(weights, deltas, strict=True))


def ties(
  deltas: list[Array], weights: tuple[float, ...], density: float, vote: str, count: bool = False
) -> Array:
  """TIES (Yadav et al. 2023, algorithm 1): trim, elect a sign, mean of those that agree.

  Args:
    deltas: one per task.
    weights: each scales its task's delta in the mean.
    density: the share of entries that trimming keeps.
    vote: 'weighted' elects the sign of sum(w delta), 'unweighted' of sum(delta), as PEFT does.
    count: elects by the number of signs instead of by their sum.
  """
  trimmed = np.stack([prune(d, density) for d in deltas])
  scaled = np.stack([w * d for w, d in zip(weights, trimmed, strict=True)])
  voters = scaled if vote == 'weighted' else trimmed
  elected = np.where((np.sign(voters) if count else voters).sum(0) >= 0, 1, -1)
  agree = np.sign(voters) == elected
  return (scaled * agree).sum(0) / np.maximum(agree.sum(0), 1)


def truncated(delta: Array, rank: int) -> Array:
  u, s, v = np.linalg.svd(delta, full_matrices=False)
  return (u[:, :rank] * s[:rank]) @ v[:rank]


def masks(deltas: list[Array], density: float) -> list[Array]:
  return [
    (np.random.default_rng(i).random(d.shape) < density).astype(np.float64)
    for i, d in enumerate(deltas)
  ]


def expected(method: str, deltas: list[Array], weights: tuple[float, ...], **more: Any) -> Array:
  """The merged delta, from deltas that hold each adapter's scale."""
  density = more.get('density')
  if method in ('linear', 'cat'):
    return linear(deltas, weights)
  if method == 'svd':
    return truncated(linear(deltas, weights), more['svd_rank'])
  if method == 'magnitude_prune':
    return linear([prune(d, density) for d in deltas], weights)
  if method == 'dare_linear':
    kept = zip(deltas, masks(deltas, density), strict=True)
    return linear([d * m / density for d, m in kept], weights)
  count = more.get('majority_sign_method') == 'frequency'
  return ties(deltas, weights, density, 'unweighted', count)


METHODS = {
  'linear': ('linear', {}),
  'cat': ('cat', {}),
  'svd_full': ('svd', {'svd_rank': 4}),
  'svd_rank_2': ('svd', {'svd_rank': 2}),
  'ties': ('ties', {'density': 0.5}),
  'ties_frequency': ('ties', {'density': 0.5, 'majority_sign_method': 'frequency'}),
  'dare_linear': ('dare_linear', {'density': 0.5}),
  'magnitude_prune': ('magnitude_prune', {'density': 0.5}),
}


def family(name: str, fields: tuple[dict[str, Any], dict[str, Any]], same: bool) -> Any:
  """A layer [12 -> 8] with adapters a and b, and the delta of each."""

  class One(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.layer = torch.nn.Linear(12, 8)

  def config(more):
    return peft.LoraConfig(**{'r': 2, 'target_modules': ['layer'], **more})

  model = peft.get_peft_model(One(), config(fields[0]), adapter_name='a')
  model.add_adapter('b', config(fields[1]))
  layer = model.base_model.model.layer.double()
  arrays = {}
  for adapter in ('a', 'b'):
    for part in ('lora_A', 'lora_B'):
      for key, value in getattr(layer, part)[adapter].named_parameters():
        seed = f'{name} {"a" if same else adapter} {part} {key}'
        value.data = random(seed, tuple(value.shape), 0.5).double()
        arrays[f'{name}/{adapter}/{part}.{key}'] = value.data
    arrays[f'{name}/{adapter}/delta'] = layer.get_delta_weight(adapter).detach().numpy()
    arrays[f'{name}/{adapter}/scale'] = layer.scaling[adapter]
  return model, layer, arrays


def merges(root: pathlib.Path) -> None:
  """Two adapters merged by every method, by PEFT and on deltas."""
  scales = {'lora_alpha': 4}, {'lora_alpha': 2}
  families = {
    'plain': (scales, WEIGHTS, False),
    'halves_of_the_same': (({'lora_alpha': 4},) * 2, (0.5, 0.5), True),
    'rslora': (tuple({**s, 'use_rslora': True} for s in scales), WEIGHTS, False),
    'bias': (tuple({**s, 'lora_bias': True} for s in scales), WEIGHTS, False),
  }
  arrays, facts = {}, {}
  for name, (fields, weights, same) in families.items():
    model, layer, held = family(name, fields, same)
    arrays.update(held)
    deltas = [held[f'{name}/{adapter}/delta'] for adapter in ('a', 'b')]
    for label, (method, more) in METHODS.items():
      torch.manual_seed(0)
      model.base_model.add_weighted_adapter(
        ['a', 'b'], list(weights), label, combination_type=method, **more
      )
      theirs = layer.get_delta_weight(label).detach().double().numpy()
      right = expected(method, deltas, weights, **more)
      arrays[f'{name}/{label}/peft'] = theirs
      arrays[f'{name}/{label}/expected'] = right
      facts[f'{name}/{label}'] = {
        'method': method,
        'weights': weights,
        **more,
        'error_of_peft': round(float(np.linalg.norm(theirs - right) / np.linalg.norm(right)), 4),
        'scale_of_peft': round(float((theirs * right).sum() / (right * right).sum()), 4),
      }
    if name == 'bias':
      both = [held[f'bias/{a}/scale'] * held[f'bias/{a}/lora_B.bias'].numpy() for a in ('a', 'b')]
      arrays['bias/expected_bias'] = linear(both, weights)
      arrays['bias/peft_bias'] = layer.lora_B['linear'].bias
  weighted = {
    vote: ties([arrays['plain/a/delta'], arrays['plain/b/delta']], WEIGHTS, 0.5, vote)
    for vote in ('weighted', 'unweighted')
  }
  arrays.update({f'plain/ties/{vote}_vote': value for vote, value in weighted.items()})
  for i, mask in enumerate(masks(deltas, 0.5)):
    arrays[f'mask_{"ab"[i]}'] = mask
  save_arrays(root / 'weighted_merge' / 'merges.npz', arrays, np.float64)
  save_json(root / 'weighted_merge' / 'merges.json', facts)


BY_HAND = {
  'deltas': [
    [4.0, -3.0, 0.5, 2.0, -1.0, 0.0],
    [2.0, 5.0, -0.2, -6.0, -1.5, 0.1],
    [-1.5, 1.0, 0.1, -3.0, 2.0, 0.2],
  ],
  'density': 0.5,
  'trimmed': [[4, -3, 0, 2, 0, 0], [2, 5, 0, -6, 0, 0], [-1.5, 0, 0, -3, 2, 0]],
  'weights_1_1_1': {'sums': [4.5, 2, 0, -7, 2, 0], 'merged': [3, 5, 0, -4.5, 2, 0]},
  'weights_1_half_2': {
    'weights': [1.0, 0.5, 2.0],
    'merged_unweighted_vote': [2.5, 2.5, 0, -4.5, 4, 0],
    'merged_weighted_vote': [2.5, -3, 0, -4.5, 4, 0],
  },
}


def ties_by_hand(root: pathlib.Path) -> None:
  """The numbers above were worked out with pencil and paper; the code must find them too."""
  deltas = [np.array(d) for d in BY_HAND['deltas']]
  one, half = BY_HAND['weights_1_1_1'], BY_HAND['weights_1_half_2']
  assert [prune(d, 0.5).tolist() for d in deltas] == BY_HAND['trimmed']
  for vote in ('weighted', 'unweighted'):
    assert ties(deltas, (1, 1, 1), 0.5, vote).tolist() == one['merged']
    assert ties(deltas, half['weights'], 0.5, vote).tolist() == half[f'merged_{vote}_vote']
  theirs = peft.utils.merge_utils.ties(
    [torch.from_numpy(d) for d in deltas], torch.tensor(half['weights']).double(), density=0.5
  )
  assert theirs.tolist() == half['merged_unweighted_vote']
  save_json(root / 'weighted_merge' / 'ties_by_hand.json', BY_HAND)


def adalora_schedule(root: pathlib.Path) -> None:
  """Budgets, scores and masks of PEFT's rank allocator over twelve steps of gradient descent."""

  class Two(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.first, self.second = torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)

    def forward(self):
      return types.SimpleNamespace(loss=torch.zeros((), dtype=torch.float64))

  fields = {'init_r': 4, 'target_r': 2, 'lora_alpha': 8, 'deltaT': 2, 'orth_reg_weight': 0.5}
  steps = {'total_step': 12, 'tinit': 2, 'tfinal': 3, 'beta1': 0.8, 'beta2': 0.9}
  config = peft.AdaLoraConfig(target_modules=['first', 'second'], **fields, **steps)
  model = peft.get_peft_model(Two(), config).double()
  found = trainables(model)
  for key, value in found.items():
    value.data = random(f'adalora schedule {key}', tuple(value.shape), 0.5).double()
  arrays: dict[str, Any] = {f'start/{k}': v.data.clone() for k, v in found.items()}
  arrays['orthogonal_loss_at_start'] = model.base_model().loss  # PeftModel itself leaves it out
  allocator, budgets = model.base_model.rankallocator, []
  for step in range(config.total_step):
    for key, value in found.items():
      value.grad = random(f'{step} {key}', tuple(value.shape)).double()
      arrays[f'grad/{step}/{key}'] = value.grad
      value.data -= 0.1 * value.grad
    model.base_model.update_and_allocate(step)
    budgets.append(allocator.budget_schedule(step)[0])
    for key, value in found.items():
      if key.endswith('lora_E'):
        arrays[f'after/{step}/{key}'] = value.data.clone()
  arrays['budget'] = np.array(budgets)
  save_arrays(root / 'adalora' / 'schedule.npz', arrays)
  save_json(root / 'adalora' / 'schedule.json', {**fields, **steps, 'learning_rate': 0.1})


def loftq(root: pathlib.Path) -> None:
  """Algorithm 1 of the LoftQ paper with NF4 in blocks of 64, which PEFT runs on a GPU only."""
  w = random('loftq weight', (32, 64), 0.3).double().numpy()
  codes = np.array(NF4)

  def quantized(x):
    block = np.abs(x).max(1, keepdims=True)  # one row is one block of 64
    return block * codes[np.abs((x / block)[..., None] - codes).argmin(-1)]

  arrays: dict[str, Any] = {'weight': w}
  a = b = None
  for step in range(1, 6):
    q = quantized(w if a is None else w - b @ a)
    u, s, v = np.linalg.svd(w - q, full_matrices=False)
    a, b = np.sqrt(s[:4])[:, None] * v[:4], u[:, :4] * np.sqrt(s[:4])
    if step in (1, 5):
      arrays.update({f'{step}/quantized': q, f'{step}/low_rank': b @ a})
      arrays[f'{step}/error'] = np.linalg.norm(w - q - b @ a)
  arrays['error_without'] = np.linalg.norm(w - quantized(w))
  save_arrays(root / 'loftq' / 'linear_64.npz', arrays)


def write(root: pathlib.Path) -> None:
  merges(root)
  ties_by_hand(root)
  adalora_schedule(root)
  loftq(root)

"""Writes hf/NAME/{config.json, model.safetensors, logits.npz} for the families of FAMILIES.md.

  pip install torch==2.13.0 transformers==5.24.0   (Python 3.11, CPU)
  python -m tests.goldens.make_hf_families tests/goldens/hf [NAME ...]   (from the checkout)

As make_hf_tiny.py, but the names of the tensors are those of the published checkpoints, also where
transformers keeps experts as stacks, and the logits are computed in float32 (with eager attention
and experts). A second run writes the same bytes. A draw of weights is refused, and the next one
taken, where rounding matters: where float64 gives other logits by more than MOST_ROUNDING, or
where the choice of an expert is closer than CLOSEST_CHOICE.
"""

import json
import os
import pathlib
import sys
import tempfile
import zlib

os.environ['HF_HUB_OFFLINE'] = '1'  # set before the hub's client is imported: nothing is asked

import numpy as np
import safetensors.torch
import torch
import transformers

from tests.goldens.hf_family_configs import CONFIGS

LENGTH = 20
LENGTHS = {'qwen3_next_long': 70}
SHARD_SIZES = {'qwen3_moe': '50KB'}
MOST_ROUNDING = 2e-5
CLOSEST_CHOICE = 3e-4
DRAWS = 100
AROUND_START = ('norm', 'layer_scalar', 'per_expert_scale', 'router.scale', 'dt_bias')
MXFP4_BLOCK = 32


def main(output: str, *names: str) -> None:
  torch.set_num_threads(1)
  transformers.logging.disable_progress_bar()
  for name in names or CONFIGS:
    folder = pathlib.Path(output) / name
    config = CONFIGS[name]
    text = config.get('text_config', config)
    seed = zlib.crc32(name.encode())
    shape = (2, LENGTHS.get(name, LENGTH))
    tokens = np.random.default_rng(seed).integers(4, min(text['vocab_size'], 90), shape)
    for draw in range(DRAWS):
      write_weights(folder, config, seed + draw, SHARD_SIZES.get(name, '1GB'))
      logits, rounding, gap = run(folder, torch.from_numpy(tokens))
      if rounding < MOST_ROUNDING and gap > CLOSEST_CHOICE:
        break
    else:
      raise ValueError(f'{name}: rounding matters in each of {DRAWS} draws of weights.')
    np.savez_compressed(
      folder / 'logits.npz', tokens=tokens.astype(np.int32), logits=logits.numpy()
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(
      f'{name:18} draw {draw:2}, rounding {rounding:.1e}, closest choice {gap:.4f}, '
      f'scale {logits.abs().max():.2f}, {size} bytes'
    )


def write_weights(folder: pathlib.Path, config: dict, seed: int, shard_size: str) -> None:
  """Writes config.json, and random weights under the published names."""
  folder.mkdir(parents=True, exist_ok=True)
  for file in folder.iterdir():
    file.unlink()
  plain = {k: v for k, v in config.items() if k != 'quantization_config'}
  write_json(folder / 'config.json', plain)
  read = transformers.AutoConfig.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_config(read, dtype=read.dtype)
  rng = torch.Generator().manual_seed(seed)
  seen = set()
  for name, tensor in model.state_dict().items():
    if tensor.data_ptr() not in seen:  # a tied head is the embedding
      tensor.copy_(random_like(name, tensor.float(), rng, config))
    seen.add(tensor.data_ptr())
  with tempfile.TemporaryDirectory() as scratch:
    model.save_pretrained(scratch, max_shard_size=shard_size)
    for file in sorted(pathlib.Path(scratch).glob('model*')):
      (folder / file.name).write_bytes(file.read_bytes())
  if plain != config:
    write_json(folder / 'config.json', config)
    quantize(folder / 'model.safetensors', rng)


def random_like(name: str, start: torch.Tensor, rng: torch.Generator, config: dict) -> torch.Tensor:
  """Random values of a tensor's shape, such that each term of the model matters."""
  if name.endswith('A_log'):  # decays from forgetting at once to forgetting nothing
    return torch.log(0.02 + 1.5 * torch.rand(start.shape, generator=rng))
  noise = torch.randn(start.shape, generator=rng)
  if any(word in name for word in AROUND_START):
    return start + 0.3 * noise
  if start.ndim == 1 or name.endswith('_bias'):
    return noise if name.endswith('sinks') else 0.3 * noise
  stacked_in_out = config['model_type'] == 'gpt_oss' and '.experts.' in name
  fan_in = start.shape[-2] if stacked_in_out else start.shape[-1]
  strength = 4.0 if stacked_in_out and 'gate_up' in name else 1.2  # so that the clamps bite
  return strength * fan_in**-0.5 * noise


def quantize(path: pathlib.Path, rng: torch.Generator) -> None:
  """Replaces gpt_oss's expert stacks [experts, in, out] by random mxfp4 blocks and scales."""
  tensors = safetensors.torch.load_file(path)
  for name in [n for n in tensors if n.endswith(('gate_up_proj', 'down_proj'))]:
    experts, ins, outs = tensors.pop(name).shape
    shape = (experts, outs, ins // MXFP4_BLOCK)
    draw = dict(generator=rng, dtype=torch.uint8)
    top = 125 if 'gate_up' in name else 123  # two to the power of (scale - 127)
    tensors[f'{name}_blocks'] = torch.randint(256, (*shape, MXFP4_BLOCK // 2), **draw)
    tensors[f'{name}_scales'] = torch.randint(top - 3, top + 1, shape, **draw)
  safetensors.torch.save_file(tensors, path, metadata={'format': 'pt'})


def run(folder: pathlib.Path, tokens: torch.Tensor) -> tuple[torch.Tensor, float, float]:
  """The logits [batch, length, vocab] of a folder, their rounding, and the closest choice."""
  model, loading = transformers.AutoModelForCausalLM.from_pretrained(
    folder,
    attn_implementation='eager',
    experts_implementation='eager',
    dtype=torch.float32,
    output_loading_info=True,
  )
  if any(loading.values()):
    raise ValueError(f'{folder}: {loading}')
  with torch.no_grad(), Choices() as choices:
    logits = model.eval()(tokens, use_cache=False).logits
    exact = model.double()(tokens, use_cache=False).logits
  return logits, float((logits - exact).abs().max()), choices.closest


class Choices(torch.overrides.TorchFunctionMode):
  """Notes the smallest distance between the last value that a top-k takes and the next."""

  closest = float('inf')

  def __torch_function__(self, function, types, args=(), kwargs=None):
    del types
    kwargs = kwargs or {}
    if function in (torch.topk, torch.Tensor.topk):
      values, count = args[0], args[1] if len(args) > 1 else kwargs['k']
      ordered = values.sort(dim=-1, descending=True).values
      if count < ordered.shape[-1]:
        gaps = ordered[..., count - 1] - ordered[..., count]
        self.closest = min(self.closest, float(gaps.min()))
    return function(*args, **kwargs)


def write_json(path: pathlib.Path, value: dict) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n')


if __name__ == '__main__':
  main(*sys.argv[1:])

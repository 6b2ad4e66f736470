"""Writes peft_ours.npz: what PEFT makes of the folders that peftlab writes.

  python -m tests.goldens.make_peft_ours write DIR                      (where peftlab is)
  pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2           (Python 3.11, CPU)
  python -m tests.goldens.make_peft_ours read DIR tests/goldens/peft_ours.npz

`write` loads each folder of peft_zoo into the tiny Llama of peft_lora and saves it again under DIR.
`read` loads those into transformers' Llama by PEFT, in float64, and stops where the logits are not
those of peft_zoo (1e-4). The file holds per folder TYPE/CASE the logits [2, 3, 40] at every fourth
token, and the SHA-256 of its two files as TYPE/CASE.digest.
"""

import hashlib
import json
import pathlib
import sys
import warnings

import numpy as np

HERE = pathlib.Path(__file__).parent
ZOO, BASE = HERE / 'peft_zoo', HERE / 'peft_lora' / 'base'
FILES = ('adapter_config.json', 'adapter_model.safetensors')
EVERY = slice(3, None, 4)
# Left out: what peftlab refuses (see tests/formats/peft_zoo_test.py).
REFUSED = ('bd_lora/list', 'pissa/raw', 'vblora/top_k')
PROMPTS = ('prompt', 'prefix', 'p_tuning')


def cases() -> list[str]:
  """TYPE/CASE of every folder of peft_zoo that goes on layers."""
  found = [f'{path.parts[-3]}/{path.parts[-2]}' for path in ZOO.glob(f'*/*/{FILES[0]}')]
  return sorted(c for c in found if c.split('/')[0] not in PROMPTS and c not in REFUSED)


def tokens(case: str) -> np.ndarray:
  """The tokens [2, 12] of a case."""
  kind = case.split('/')[0]
  own = (
    np.load(ZOO / kind / 'logits.npz') if kind == 'alora' else np.load(ZOO / 'base' / 'llama.npz')
  )
  return own['tokens']


def logits(case: str) -> np.ndarray:
  """The logits [2, 12, 40] that peft_zoo has of a case."""
  kind, label = case.split('/')
  return np.load(ZOO / kind / 'logits.npz')[label]


def digest(folder: pathlib.Path) -> str:
  """Of the two files of a PEFT folder, its config in any order."""
  config, tensors = (folder / name for name in FILES)
  text = json.dumps(json.loads(config.read_text()), sort_keys=True)
  return hashlib.sha256(text.encode() + tensors.read_bytes()).hexdigest()


def write(target: pathlib.Path) -> None:
  """Saves every case with peftlab."""
  import peftlab

  model = peftlab.load_model(BASE)
  for case in cases():
    folder = target / case
    folder.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # what is told of layers that a folder leaves out
      peftlab.save_adapter(peftlab.load_adapter(model, ZOO / case), folder)
    assert (folder / FILES[0]).exists(), case


def read(source: pathlib.Path, out: pathlib.Path) -> None:
  """Loads every case with PEFT."""
  import peft
  import torch
  import transformers

  held = {}
  for case in cases():
    base = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    model = peft.PeftModel.from_pretrained(base, str(source / case)).double().eval()
    ids = torch.from_numpy(tokens(case)).long()
    with torch.no_grad():
      found = model(input_ids=ids).logits.numpy()
    gap = np.abs(found - logits(case)).max()
    print(f'{case:30} {gap:.1e}')
    assert gap < 1e-4, case
    held[case] = found[:, EVERY].astype(np.float32)
    held[f'{case}.digest'] = np.asarray(digest(source / case))
  np.savez_compressed(out, **held)


if __name__ == '__main__':
  if sys.argv[1] == 'write':
    write(pathlib.Path(sys.argv[2]))
  else:
    read(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))

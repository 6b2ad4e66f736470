"""Makes the files that `bad_input_test` spoils, in the current folder, and spoils them."""

import functools
import json
import pathlib
import struct

import gguf
import numpy as np

from peftlab.formats.safetensors_file import SafetensorsFile, write_safetensors
from tests.models import goldens

# What a run of the cases begins with: a small base, a small text, two updates.
EXPERIMENT = """
from peftlab.plugins.lora import LoRA
from peftlab.train.config import BaseConfig, DataConfig, Experiment, TrainConfig


def get_config(corpus='good.jsonl'):
  return Experiment(
    base=BaseConfig(source='package:glassllm/en'),
    adapter=LoRA(rank=2),
    data=DataConfig(corpus=corpus, length=16, batch=2, eval_rows=2),
    train=TrainConfig(steps=2, samples=0, checkpoint_every=1),
  )
"""
GOOD_ROWS = [
  {'prompt': f'what is {n} and {n}?', 'completion': f' it is {2 * n}.'} for n in range(40)
]


def write(name: str, content: str | bytes) -> None:
  """A file with this content; its folder is made."""
  path = pathlib.Path(name)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_rows(*rows: object) -> None:
  """bad.jsonl: good rows, then these; a string is a line as it is."""
  lines = [r if isinstance(r, str) else json.dumps(r) for r in (*GOOD_ROWS[:1], *rows)]
  write('bad.jsonl', '\n'.join(lines))


def write_good_files() -> None:
  """tiny.py and good.jsonl."""
  write('tiny.py', EXPERIMENT)
  write('good.jsonl', '\n'.join(map(json.dumps, GOOD_ROWS)))


def edit(name: str, **changes: object) -> None:
  """Changes fields of a JSON file; None removes one."""
  content = json.loads(pathlib.Path(name).read_text()) | changes
  write(name, json.dumps({k: v for k, v in content.items() if v is not None}))


def cut(name: str, share: float = 0.5) -> None:
  """Leaves the first part of a file."""
  content = pathlib.Path(name).read_bytes()
  write(name, content[: int(len(content) * share)])


def flip(name: str) -> None:
  """Turns over the bits of a byte in the middle of a file."""
  content = bytearray(pathlib.Path(name).read_bytes())
  content[len(content) // 2] ^= 0xFF
  write(name, bytes(content))


def largest(pattern: str) -> str:
  """The largest file that a pattern finds."""
  return str(max(pathlib.Path().glob(pattern), key=lambda path: path.stat().st_size))


def edit_tensors(name: str, changes: dict[str, np.ndarray | None]) -> None:
  """Changes tensors of a safetensors file; None removes one."""
  tensors = {**SafetensorsFile(name), **changes}
  write_safetensors(name, {k: np.array(v) for k, v in tensors.items() if v is not None})


def edit_header(name: str, change) -> None:
  """Changes the header of a safetensors file in place, whatever it then claims."""
  content = pathlib.Path(name).read_bytes()
  (length,) = struct.unpack('<Q', content[:8])
  header = json.loads(content[8 : 8 + length])
  change(header)
  new = json.dumps(header).encode()
  write(name, struct.pack('<Q', len(new)) + new + content[8 + length :])


def first_tensor(name: str) -> str:
  """The name of a tensor of a safetensors file."""
  return next(iter(SafetensorsFile(name)))


def write_hf(config: dict | None = None, tensors: dict | None = None) -> None:
  """hf/: a small llama, with fields of its config or tensors changed."""
  goldens.edited('llama', pathlib.Path('hf'), config, tensors)


@functools.cache
def _gguf(path: pathlib.Path) -> bytes:
  source = goldens.HfWeights(goldens.HF / 'llama')
  goldens.write_gguf(source, path, 'llama', goldens.gguf_keys(source.config))
  content = path.read_bytes()
  path.unlink()
  return content


def write_gguf(*, architecture: str = 'llama', share: float = 1.0) -> None:
  """x.gguf: a small llama under an architecture's name, of which a part is left."""
  content = _gguf(pathlib.Path('made.gguf'))
  assert content.count(b'llama') > 5
  content = content.replace(b'llama', architecture.encode())
  write('x.gguf', content[: int(len(content) * share)])


def lie_in_gguf(tensor: str, dimension: int) -> None:
  """x.gguf, whose header gives a tensor another first dimension."""
  write_gguf()
  content = bytearray(pathlib.Path('x.gguf').read_bytes())
  at = content.index(tensor.encode()) + len(tensor) + 4  # behind the name: number of dimensions
  struct.pack_into('<Q', content, at, dimension)
  write('x.gguf', bytes(content))


def write_foreign_gguf() -> None:
  """x.gguf of llama with a tensor that has no place in it."""
  writer = gguf.GGUFWriter('x.gguf', 'llama')
  source = goldens.HfWeights(goldens.HF / 'llama')
  for key, value in goldens.gguf_keys(source.config).items():
    add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
    add(f'llama.{key}', value)
  writer.add_tensor('blk.0.attn_qq.weight', np.zeros((2, 32), np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def write_rubbish_npz() -> None:
  """x.npz, whose compressed bytes are spoilt."""
  np.savez_compressed('x.npz', weights=np.arange(4000.0))
  content = bytearray(pathlib.Path('x.npz').read_bytes())
  content[200:400] = bytes(200)
  write('x.npz', bytes(content))

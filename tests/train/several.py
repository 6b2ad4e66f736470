"""Tiny runs of the command `peftlab train` in one process of 8 devices, or in two of 4 each."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / 'tests' / 'goldens' / 'hf' / 'llama'
WORDS = 95  # and <eos>: the vocabulary of MODEL

EXPERIMENT = """
import os

from peftlab.plugins.lora import LoRA
from peftlab.train.config import *
from tests.sweep import tiny_sweep

tiny_sweep.slow_down(float(os.environ.get('SECONDS_PER_UPDATE', '0')))


def get_config():
  return Experiment(
    name='tiny',
    base=BaseConfig(source={model!r}, remat='none'),
    adapter=LoRA(rank=4, dropout=0.1),
    where=('attn.q',),
    data=DataConfig(corpus={corpus!r}, length=15, batch=8, eval_rows=8),
    mesh=MeshConfig(fsdp=4, tensor=2),
    train=TrainConfig(
      steps=6,
      learning_rate=0.01,
      checkpoint_every=2,
      keep=3,
      log_every=1,
      samples=0,
      sample_tokens=0,
    ),
  )


def sweep_rank():
  yield {{'adapter.rank': 4}}
"""


def write(folder: pathlib.Path) -> pathlib.Path:
  """A model with a tokenizer, a text, and an experiment on them; the file of the experiment."""
  model, text = folder / 'model', folder / 'text.txt'
  shutil.copytree(MODEL, model)
  words = {'<eos>': 0} | {f'w{i}': i for i in range(1, WORDS + 1)}
  level = tokenizers.models.WordLevel(words, unk_token='<eos>')
  backend = tokenizers.Tokenizer(level)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.save(str(model / 'tokenizer.json'))
  (model / 'tokenizer_config.json').write_text('{"eos_token": "<eos>"}')
  lines = [' '.join(f'w{(7 * i + j * j) % WORDS + 1}' for j in range(40)) for i in range(30)]
  text.write_text('\n\n'.join(lines) + '\n')
  path = folder / 'tiny.py'
  path.write_text(EXPERIMENT.format(model=str(model), corpus=str(text)))
  return path


def free_port() -> int:
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    return found.getsockname()[1]


def environment(experiment: pathlib.Path, devices: int, seconds: float) -> dict[str, str]:
  known = {
    'PYTHONPATH': str(ROOT),
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': str(devices),
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    # What one process of a test has compiled serves those after it.
    'JAX_COMPILATION_CACHE_DIR': str(experiment.parent / 'cache'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'XLA_FLAGS': '',
    'SECONDS_PER_UPDATE': str(seconds),
  }
  return os.environ | known


def start(experiment, name, *more, devices: int, seconds: float = 0.0) -> subprocess.Popen:
  """A process of the command `peftlab NAME --config=EXPERIMENT ...`."""
  return subprocess.Popen(
    [sys.executable, '-m', 'peftlab', name, f'--config={experiment}', *map(str, more)],
    env=environment(experiment, devices, seconds),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def places(count: int) -> list[list[str]]:
  """The flags that tell each of some processes its place."""
  here = f'--coordinator=127.0.0.1:{free_port()}'
  return [[here, f'--num_processes={count}', f'--process_id={i}'] for i in range(count)]


def ended(started) -> list[tuple[int, str]]:
  """(exit code, output) of each process."""
  with contextlib.ExitStack() as stack:
    for process in started:
      stack.callback(process.kill)
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(p.returncode, output) for p, output in zip(started, outputs, strict=True)]


def train(experiment, workdir, *more, count: int = 1) -> list[tuple[int, str]]:
  """(exit code, output) of each of `count` processes of one run on 8 devices.

  One process joins itself, so that its collectives are gloo's as well: XLA's own add up in another
  order, where more than two devices do.
  """
  flags = [f'--workdir={workdir}', *more]
  started = [
    start(experiment, 'train', *flags, *place, devices=8 // count) for place in places(count)
  ]
  return ended(started)


def wait(found, process: subprocess.Popen, seconds: float = 200.0) -> None:
  """Waits until `found()`, while a process runs."""
  last = time.monotonic() + seconds
  while not found():
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < last, 'it took too long'
    time.sleep(0.1)


def processes(root, number: int) -> list[int]:
  """The processes of a root that were told that they are number `number`."""
  found = []
  for folder in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      told = (folder / 'environ').read_bytes().split(b'\0')
      line = (folder / 'cmdline').read_bytes()
    except OSError:  # it has ended, or is not ours
      continue
    if f'JAX_PROCESS_ID={number}'.encode() in told and f'--workdir={root}'.encode() in line:
      found.append(int(folder.name))
  return found


def records(workdir) -> list[dict]:
  """The whole lines of the metrics, without the times in them."""
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  lines = path.read_text().split('\n')[:-1] if path.exists() else []
  found = [json.loads(line) for line in lines]
  return [{k: v for k, v in record.items() if k != 'seconds'} for record in found]

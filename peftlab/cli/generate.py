"""Continue a prompt by a base model or an adapter: --prompt=TEXT [--adapter=DIR] [--compare]."""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import shutil
import textwrap
import typing
from typing import Any

from absl import flags

from peftlab.cli import _flags, _help, _source
from peftlab.formats import files

if typing.TYPE_CHECKING:
  from flax import nnx

  from peftlab.data.tokenizers import Tokenizer

_GAP, _NONE = ' | ', 'none'


def _define(values: flags.FlagValues) -> None:
  options: dict[str, Any] = {'flag_values': values}
  text = 'a GGUF file, an HF safetensors folder, or package:NAME'
  flags.DEFINE_string(
    'base',
    '',
    f'{text}. Default: what the adapter was trained on, else {_source.DEFAULT}',
    **options,
  )
  text = 'folder of an adapter; with --compare several'
  flags.DEFINE_multi_string('adapter', [], text, **options)
  flags.DEFINE_bool('any_base', False, 'take an adapter made on another base', **options)
  text = 'a text to continue; several are continued at once'
  flags.DEFINE_multi_string('prompt', [], text, **options)
  text = 'a UTF-8 file with one more prompt; its last line end is left out'
  flags.DEFINE_string('prompt_file', '', text, **options)
  text = 'put each prompt into the chat template of the base; --no-chat: plain text'
  flags.DEFINE_bool('chat', False, text, **options)
  text = 'show the base and the adapters side by side'
  flags.DEFINE_bool('compare', False, text, **options)
  text = "each prompt has the adapter that is given at its place; 'none': the base"
  flags.DEFINE_bool('each', False, text, **options)
  text = 'how many tokens are made, at most'
  flags.DEFINE_integer('max_tokens', 64, text, lower_bound=1, **options)
  text = 'divides the logits; 0: always the likeliest token'
  flags.DEFINE_float('temperature', 0.0, text, **options)
  flags.DEFINE_integer('top_k', 0, 'draw from the k likeliest tokens; 0: from all', **options)
  text = 'draw from the likeliest tokens whose probabilities come to p'
  flags.DEFINE_float('top_p', 1.0, text, **options)
  text = 'of the draws; of a second prompt it is 1 more'
  flags.DEFINE_integer('seed', 0, text, lower_bound=0, **options)
  text = 'of weights and activations: float32, bfloat16, float16'
  flags.DEFINE_string('dtype', 'float32', text, **options)


def run(argv: list[str]) -> int:
  """`peftlab generate`."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print(f'peftlab generate --prompt=TEXT [--adapter=DIR]\n\n{__doc__}\n')
    print(_help.show_flags(values))
    return 0
  values = _flags.parse_plain(['--nochat' if a == '--no-chat' else a for a in argv], _define)
  prompts = _prompts(values)
  _check_adapters(values, len(prompts))
  base = _source.base_source(values.base, _folders(values))
  from peftlab import serve
  from peftlab.data.tokenizers import load_tokenizer
  from peftlab.serve import text

  sampling = serve.Sampling(temperature=values.temperature, top_k=values.top_k, top_p=values.top_p)
  tokenizer = load_tokenizer(base)
  ids = [text.prompt_ids(tokenizer, prompt, chat=values.chat) for prompt in prompts]
  models = _models(values, base)
  options = {
    'max_tokens': values.max_tokens,
    'sampling': sampling,
    'stop': (tokenizer.eos_id,),
    'seed': values.seed,
  }
  if len(models) == 1 and len(ids) == 1:
    _say_as_it_comes(next(iter(models.values())), tokenizer, ids[0], options)
    return 0
  made = {name: serve.generate(model, ids, **options) for name, model in models.items()}
  for number, prompt in enumerate(prompts):
    texts = {name: text.text_of(tokenizer, ids[number], t[number]) for name, t in made.items()}
    _show(prompt, texts)
  return 0


def _prompts(values: Any) -> list[str]:
  """The prompts of the flags, in the order of --prompt, then --prompt_file."""
  prompts = list(values.prompt)
  if values.prompt_file:
    path = files.existing_file(values.prompt_file)
    try:
      prompts.append(path.read_text(encoding='utf-8').removesuffix('\n'))
    except UnicodeDecodeError as error:
      raise ValueError(f"Prompt file '{path}' is not UTF-8: {error}.") from error
  if not prompts:
    raise ValueError('There is no prompt; expected --prompt=TEXT or --prompt_file=FILE.')
  if not all(prompts):
    raise ValueError('A prompt is empty; expected some text.')
  return prompts


def _folders(values: Any) -> list[str]:
  """The folders of --adapter, each once."""
  given = [f for f in values.adapter if not (values.each and f == _NONE)]
  return list(dict.fromkeys(given))


def _check_adapters(values: Any, count: int) -> None:
  if values.each and values.compare:
    raise ValueError('--each and --compare exclude one another.')
  if values.each and len(values.adapter) != count:
    raise ValueError(
      f'--each needs an adapter for each prompt ({count}), given {len(values.adapter)}; '
      f'--adapter={_NONE} stands for the base.'
    )
  if values.compare and not values.adapter:
    raise ValueError('--compare has nothing to compare with; expected --adapter=DIR too.')
  if len(values.adapter) > 1 and not values.compare and not values.each:
    raise ValueError(
      f'{len(values.adapter)} adapters are given; expected one, or --compare or --each.'
    )
  for folder in _folders(values):
    files.existing_folder(folder)


def _models(values: Any, source: str) -> dict[str, nnx.Module]:
  """{title: model}: the base (alone, or with --compare) and the adapters, all on one base."""
  from peftlab.models.load import load_model

  base = load_model(source, dtype=values.dtype)
  if values.each:
    return {'': _mixed(base, source, values)}
  models: dict[str, nnx.Module] = {}
  if values.compare or not values.adapter:
    models['base'] = base
  for folder in values.adapter:
    models[str(pathlib.Path(folder))] = _adapted(base, source, folder, values.any_base)
  return models


def _mixed(base: nnx.Module, source: str, values: Any) -> nnx.Module:
  """A model for a batch whose rows have the adapters of the flags."""
  from peftlab import serve

  names = {folder: f'a{i}' for i, folder in enumerate(_folders(values))}
  pool = serve.Pool(base, capacity=max(1, len(names)))
  for folder, name in names.items():
    pool.add(name, _adapted(base, source, folder, values.any_base))
  return pool.rows([names.get(folder) for folder in values.adapter])


def _adapted(base: nnx.Module, source: str, folder: str, any_base: bool) -> nnx.Module:
  """The base with the adapter of a folder; an error names both bases."""
  from peftlab.formats import adapter_folder

  try:
    return adapter_folder.load_adapter(base, folder, any_base=any_base)
  except ValueError as error:
    trained = adapter_folder.source_of(folder) or 'a base that its folder does not name'
    if isinstance(error, adapter_folder.OtherBaseError):
      raise ValueError(
        f"Adapter folder '{folder}' was trained on another base: {trained}, not {source}. Expected "
        '--base=SOURCE of that one; --any_base takes it all the same.'
      ) from error
    if trained != source:
      raise ValueError(
        f'{error} It was trained on {trained}; the base here is {source}. Expected --base=SOURCE.'
      ) from error
    raise


def _say_as_it_comes(
  model: nnx.Module, tokenizer: Tokenizer, prompt: Sequence[int], options: dict[str, Any]
) -> None:
  from peftlab import serve
  from peftlab.serve import text

  shown = text.TextStream(tokenizer, prompt)
  for (token,) in serve.stream(model, [prompt], **options):
    if token is not None:
      print(shown.add(token), end='', flush=True)
  print(shown.end())


def _show(prompt: str, texts: dict[str, str]) -> None:
  """Prints a prompt, and what each model says, in columns."""
  total = max(60, min(shutil.get_terminal_size().columns, 160))
  width = (total - len(_GAP) * (len(texts) - 1)) // len(texts)
  print('\n'.join(_wrapped(f'> {prompt}', total)))
  columns = [_wrapped(text, width) for text in texts.values()]
  if len(texts) > 1:
    heads = _even([_wrapped(title, width) for title in texts])
    columns = [[*head, '-' * width, *column] for head, column in zip(heads, columns, strict=True)]
  for cells in zip(*_even(columns), strict=True):
    print(_GAP.join(f'{cell:<{width}}' for cell in cells).rstrip())
  print()


def _even(columns: list[list[str]]) -> list[list[str]]:
  """The columns, the shorter ones filled up with empty lines."""
  longest = max(map(len, columns))
  return [column + [''] * (longest - len(column)) for column in columns]


def _wrapped(text: str, width: int) -> list[str]:
  lines = [textwrap.wrap(line, width) or [''] for line in text.splitlines()]
  return [line for some in lines for line in some]

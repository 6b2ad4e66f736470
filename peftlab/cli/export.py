"""Export a base with adapters merged in, as a Hugging Face folder: --adapter=DIR --out=DIR."""

from __future__ import annotations

import typing
from typing import Any

from absl import flags

from peftlab.cli import _flags, _help, _source
from peftlab.formats import files

if typing.TYPE_CHECKING:
  from flax import nnx


def _define(values: flags.FlagValues) -> None:
  options: dict[str, Any] = {'flag_values': values}
  text = 'the HF folder that the adapters were made on. Default: what they were trained on'
  flags.DEFINE_string('base', '', text, **options)
  text = 'folder of an adapter; what several add is summed'
  flags.DEFINE_multi_string('adapter', [], text, **options)
  flags.DEFINE_bool('any_base', False, 'take an adapter made on another base', **options)
  text = 'an HF folder of the same model, for its config and tokenizer, where the base is none'
  flags.DEFINE_string('like', '', text, **options)
  text = 'of the weights: float32, bfloat16, float16. Default: that of the base in its files'
  flags.DEFINE_string('dtype', None, text, **options)
  flags.DEFINE_string('out', '', 'a new or empty folder', **options)


def run(argv: list[str]) -> int:
  """`peftlab export`."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print(f'peftlab export --adapter=DIR --out=DIR\n\n{__doc__}\n')
    print(_help.show_flags(values))
    return 0
  values = _flags.parse_plain(argv, _define)
  if not values.out:
    raise ValueError('--out is missing; expected a new or empty folder.')
  for folder in values.adapter:
    files.existing_folder(folder)
  base = _source.base_source(values.base, values.adapter)
  from peftlab.formats import adapter_folder
  from peftlab.fuse import fuse
  from peftlab.models.decoder import Decoder
  from peftlab.models.load import load_model, source_path
  from peftlab.models.write import write_model

  like = values.like or base
  if not source_path(like).is_dir():
    raise ValueError(
      f"The base '{base}' is no HF folder; expected --like=DIR, one of the same model with its "
      'config.json.'
    )
  model: nnx.Module = load_model(base)
  names = [f'a{i}' for i in range(len(values.adapter))]
  for name, folder in zip(names, values.adapter, strict=True):
    model = adapter_folder.load_adapter(model, folder, name=name, any_base=values.any_base)
  for name in names:
    model = fuse(model, name=name)
  assert isinstance(model, Decoder)
  write_model(model, values.out, source=source_path(like), dtype=values.dtype)
  merged = ', '.join(values.adapter) or 'nothing'
  print(f'{values.out}: {base} with {merged} merged in')
  return 0

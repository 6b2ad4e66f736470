"""Merge adapters into one: --adapter=DIR --adapter=DIR --weights=0.5,0.5 --out=DIR."""

from __future__ import annotations

from typing import Any

from absl import flags

from peftlab.cli import _flags, _help, _source
from peftlab.formats import files


def _define(values: flags.FlagValues) -> None:
  options: dict[str, Any] = {'flag_values': values}
  text = f'of the adapters. Default: what they were trained on, else {_source.DEFAULT}'
  flags.DEFINE_string('base', '', text, **options)
  flags.DEFINE_multi_string('adapter', [], 'folder of an adapter; several', **options)
  flags.DEFINE_list('weights', [], 'one number for each adapter; default: 1 each', **options)
  text = 'linear, cat or svd: their sum; magnitude, ties, dare or dare_ties: with entries left out'
  flags.DEFINE_string('method', 'linear', text, **options)
  text = 'share of entries that is kept, for magnitude, ties, dare, dare_ties'
  flags.DEFINE_float('density', None, text, **options)
  text = 'of the result; default: the lowest that holds it'
  flags.DEFINE_integer('rank', None, text, **options)
  text = 'how ties elects a sign: by the sum, the count, or the weighted sum'
  flags.DEFINE_string('vote', 'sum', text, **options)
  flags.DEFINE_integer('seed', 0, 'of what dare leaves out', lower_bound=0, **options)
  flags.DEFINE_bool('any_base', False, 'take adapters made on another base', **options)
  flags.DEFINE_string('out', '', 'folder for the new adapter', **options)


def run(argv: list[str]) -> int:
  """`peftlab merge`."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print(f'peftlab merge --adapter=DIR --adapter=DIR --out=DIR\n\n{__doc__}\n')
    print(_help.show_flags(values))
    return 0
  values = _flags.parse_plain(argv, _define)
  weights = _weights(values.weights, values.adapter)
  for folder in values.adapter:
    files.existing_folder(folder)
  if not values.out:
    raise ValueError('--out is missing; expected a folder for the new adapter.')
  files.writable_folder(
    values.out, subject='--out', inputs=values.adapter, marker='adapter_config.json'
  )
  base = _source.base_source(values.base, values.adapter)
  from peftlab.formats import adapter_folder
  from peftlab.fuse import combine
  from peftlab.models.load import load_model

  model: Any = load_model(base)
  names = [f'a{i}' for i in range(len(values.adapter))]
  for name, folder in zip(names, values.adapter, strict=True):
    model = adapter_folder.load_adapter(model, folder, name=name, any_base=values.any_base)
  model, report = combine(
    model,
    dict(zip(names, weights, strict=True)),
    name='merged',
    method=values.method,
    density=values.density,
    rank=values.rank,
    vote=values.vote,
    rngs=values.seed,
  )
  adapter_folder.save_adapter(model, values.out, name='merged', source=base)
  for name, folder in zip(names, values.adapter, strict=True):
    print(f'{name} = {folder}')
  print(report.table())
  return 0


def _weights(given: list[str], folders: list[str]) -> list[float]:
  if not folders:
    raise ValueError('There is no adapter; expected --adapter=DIR, several times.')
  if not given:
    return [1.0] * len(folders)
  try:
    weights = [float(text) for text in given]
  except ValueError as error:
    raise ValueError(f'--weights={",".join(given)} holds something else than numbers.') from error
  if len(weights) != len(folders):
    raise ValueError(f'--weights has {len(weights)} numbers for {len(folders)} adapters.')
  return weights

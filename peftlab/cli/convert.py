"""Convert an adapter of another trainer: --from=maxtext|tunix|hf --source=PATH --out=DIR."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags
import numpy as np

from peftlab import _registry
from peftlab.cli import _flags, _help, _source
from peftlab.formats import files

_FROM = ('hf', 'maxtext', 'tunix')


def _define(values: flags.FlagValues) -> None:
  options: dict[str, Any] = {'flag_values': values}
  text = 'who wrote it: hf (a PEFT folder), maxtext or tunix (LoRA)'
  flags.DEFINE_enum('from', None, list(_FROM), text, **options)
  text = 'a PEFT folder; or the folder of an Orbax checkpoint, an .npz or a .safetensors file'
  flags.DEFINE_string('source', '', text, **options)
  text = f'the base of the adapter. Default: what its folder says, else {_source.DEFAULT}'
  flags.DEFINE_string('base', '', text, **options)
  text = 'the LoRA alpha that it was trained with, which maxtext and tunix keep elsewhere'
  flags.DEFINE_float('alpha', None, text, **options)
  flags.DEFINE_string('out', '', 'folder for the adapter; PEFT reads it too', **options)


def run(argv: list[str]) -> int:
  """`peftlab convert`."""
  if _help.wanted(argv):
    values = flags.FlagValues()
    _define(values)
    print(f'peftlab convert --from=maxtext --source=PATH --alpha=16 --out=DIR\n\n{__doc__}\n')
    print(_help.show_flags(values))
    return 0
  values = _flags.parse_plain(argv, _define)
  origin = values['from'].value
  for name, given in (('from', origin), ('source', values.source), ('out', values.out)):
    if not given:
      raise ValueError(f'--{name} is missing; expected --from=WHO --source=PATH --out=DIR.')
  if origin != 'hf' and values.alpha is None:
    raise ValueError(f'--alpha is missing: {origin} does not keep it with the factors.')
  if origin == 'hf' and values.alpha is not None:
    raise ValueError('--alpha is given, but a PEFT folder says its own.')
  files.writable_folder(
    values.out, subject='--out', inputs=[values.source], marker='adapter_config.json'
  )
  from peftlab.formats import adapter_folder
  from peftlab.models.load import load_model

  base = _source.base_source(values.base, (values.source,) if origin == 'hf' else ())
  model: Any = load_model(base)
  if origin == 'hf':
    model = adapter_folder.load_adapter(model, values.source)
  else:
    model = _with_factors(model, values.source, origin, values.alpha)
  adapter_folder.save_adapter(model, values.out, source=base)
  print(f'{values.out}: an adapter of {base}, from {values.source}')
  return 0


def _with_factors(model: Any, source: str, origin: str, alpha: float) -> Any:
  """The model with the factors of another trainer attached."""
  from peftlab.formats import adapter_values, foreign, peft_values

  subject = f"'{source}' ({origin})"
  arrays = foreign.read_arrays(source)
  factors = foreign.factors(model, arrays, foreign.ORIGINS[origin], subject=subject)
  ranks = {a.shape[1] for a, _ in factors.values()}
  if len(ranks) > 1:
    raise ValueError(f'{subject} has factors of ranks {sorted(ranks)}; expected one rank.')
  kind = _holder()
  adapters, values = {}, {}
  for layer, (a, b) in factors.items():
    plain, slots = kind.from_factors(a, b)
    field, scale = kind.peft.scale
    adapters[layer] = dataclasses.replace(plain, **{field: alpha})
    number = peft_values.constant_of(adapters[layer].slots()[scale])
    values[layer] = {**slots, scale: np.asarray(np.float32(number))}
  return adapter_values.attached(model, 'default', values, adapters, subject=subject)


def _holder() -> Any:
  """The adapter type that is two factors and a scale."""
  types = [_registry.adapters.get(name) for name in _registry.adapters.names()]
  return next(t for t in types if 'from_factors' in vars(t) and t.peft and t.peft.scale)

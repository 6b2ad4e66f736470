"""Writes the counts of hf/published_sizes.json: each model is built without arrays and counted.

  pip install torch==2.13.0 transformers==5.24.0   (Python 3.11, CPU)
  python count_hf_sizes.py hf/published_sizes.json

Of each size that file has `config`, the fields of config.json that shape the model; `published`,
how many parameters its authors' checkpoint has and what of these is not of the text model; the
sources of both; and, written here, `parameters` (a tied head counts once; without what training
leaves alone: layer_scalar, e_score_correction_bias). The two counts must agree.
"""

import json
import pathlib
import sys
from typing import Any

import torch
import transformers


def main(path: str) -> None:
  sizes = json.loads(pathlib.Path(path).read_text())
  for name, size in sizes.items():
    size['parameters'] = count(size['config'])
    published = size['published']
    others = sum(published.get('of_which_not_counted_here', {}).values())
    if size['parameters'] + others != published['parameters']:
      raise ValueError(
        f'{name}: {size["parameters"]} parameters and {others} others; '
        f'published are {published["parameters"]}.'
      )
    print(f'{name:20} {size["parameters"]:>16,}')
  pathlib.Path(path).write_text(json.dumps(sizes, indent=2) + '\n')


def count(config: dict[str, Any]) -> int:
  options = {k: v for k, v in config.items() if k != 'model_type'}
  read = transformers.AutoConfig.for_model(config['model_type'], **options)
  with torch.device('meta'):
    model = transformers.AutoModelForCausalLM.from_config(read)
  return sum(p.numel() for p in model.parameters())


if __name__ == '__main__':
  main(*sys.argv[1:])

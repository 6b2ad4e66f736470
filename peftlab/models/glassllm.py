"""The family glassllm: the two small decoders of the package glassllm, an npz file each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import os

import numpy as np

from peftlab import _registry
from peftlab.formats import files
from peftlab.models.config import DecoderConfig, Rope
from peftlab.models.families import MOST_LAYERS, Family, Fields, Format, WeightMap

_CONFIG = '__config__'


class NpzWeights(Mapping[str, np.ndarray]):
  """A lazy, read-only mapping over an npz file: name -> array. Pickled arrays are refused.

  Attributes:
    path: the file.
    config: the JSON in `__config__`.
    tensors: name -> array (small enough to be its own description).

  Raises:
    ValueError: no such file, not an npz file, no `__config__`, or pickled arrays.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = files.existing_file(path)
    try:
      with np.load(self.path, allow_pickle=False) as archive:
        self.tensors = {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy, zipfile, zlib and tokenize each raise their own
      raise ValueError(f"'{self.path}' is not an npz file of plain arrays: {error}.") from error
    if _CONFIG not in self.tensors:
      raise ValueError(f"'{self.path}' has no array {_CONFIG!r}, so it is not a glassllm model.")
    content = str(self.tensors.pop(_CONFIG))
    self.config = files.parse_json(content, subject=f"'{self.path}': {_CONFIG}")

  def __getitem__(self, name: str) -> np.ndarray:
    return self.tensors[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self.tensors)

  def __len__(self) -> int:
    return len(self.tensors)


def npz_config(source: NpzWeights) -> DecoderConfig:
  """The config in an npz file of glassllm.

  Raises:
    ValueError: a field that is missing or unknown.
  """
  f = Fields(source.config, f"'{source.path}': {_CONFIG}")
  embed, q_heads = f.count('d_model'), f.count('n_heads')
  config = DecoderConfig(
    family='glassllm',
    vocab=f.count('vocab_size'),
    layers=f.count('n_layers', limit=MOST_LAYERS),
    embed=embed,
    mlp=int(8 * embed / 3),
    q_heads=q_heads,
    kv_heads=f.count('n_kv_heads'),
    head_dim=embed // q_heads,
    max_length=f.count('max_len'),
    norm_eps=f.take('eps', float),
    rope=Rope(theta=f.take('rope_base', float)),
    rope_layout='interleaved',
  )
  f.finish(('init_std',))
  return config


FAMILY = Family(
  formats={
    'npz': Format(
      config=npz_config,
      weights=WeightMap(
        modules={
          'embed': 'E',
          'layers.attn_norm': 'blocks.{layer}.norm1',
          'layers.attn.q': 'blocks.{layer}.attn.W_Q',
          'layers.attn.k': 'blocks.{layer}.attn.W_K',
          'layers.attn.v': 'blocks.{layer}.attn.W_V',
          'layers.attn.o': 'blocks.{layer}.attn.W_O',
          'layers.mlp_norm': 'blocks.{layer}.norm2',
          'layers.mlp.gate': 'blocks.{layer}.ffn.W1',
          'layers.mlp.up': 'blocks.{layer}.ffn.W3',
          'layers.mlp.down': 'blocks.{layer}.ffn.W2',
          'norm': 'norm_f',
        },
        suffixes={'kernel': '', 'table': '', 'scale': '.gamma'},
        out_first=False,
      ),
    )
  }
)
_registry.families.register('glassllm')(FAMILY)

"""The config of a decoder as small as one can be: for every test that needs some decoder."""

from peftlab.models.config import DecoderConfig

SMALL = DecoderConfig(
  family='llama',
  vocab=29,
  layers=3,
  embed=12,
  mlp=20,
  q_heads=4,
  kv_heads=2,
  head_dim=6,
  max_length=32,
)

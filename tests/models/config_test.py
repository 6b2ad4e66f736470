"""A config that makes no sense is refused, and the message says why."""

import dataclasses

import pytest

from peftlab.models.config import Rope
from tests.models.small import SMALL


@pytest.mark.parametrize(
  ('change', 'message'),
  (
    (dict(layers=0), r'DecoderConfig\.layers is 0; it must be an integer above 0\.'),
    (dict(embed=12.0), r'DecoderConfig\.embed is 12\.0; it must be an integer above 0\.'),
    (dict(vocab=True), r'DecoderConfig\.vocab is True; it must be an integer above 0\.'),
    (dict(norm_eps=float('nan')), r'DecoderConfig\.norm_eps is nan; it must be a number above 0\.'),
    (dict(logit_softcap=-1.0), r'DecoderConfig\.logit_softcap is -1\.0'),
    (dict(activation='silo'), r"DecoderConfig\.activation is 'silo'; did you mean 'silu'\?"),
    (dict(rope_layout='halves'), r"'halves'; did you mean 'half'\? Choices: half, interleaved\."),
    (dict(dtype='float64'), r"DecoderConfig\.dtype is 'float64'; did you mean 'float16'\?"),
    (dict(kv_heads=3), r'q_heads is 4; it must be a multiple of kv_heads \(3\)\.'),
    (dict(head_dim=5), r'head_dim is 5; it must be even for RoPE\.'),
    (dict(windows=(1, 2)), r'windows has 2 entries for 3 layers\.'),
    (dict(windows=(1, -2, 3)), r'a window is 0 \(none\) or above\.'),
    (
      dict(rope=Rope(scaling='factors', factors=(1.0,))),
      r'Rope\.factors has 1 numbers; head_dim 6 needs 3\.',
    ),
  ),
)
def test_a_bad_decoder_config_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
  ('options', 'message'),
  (
    (
      dict(scaling='yarm'),
      r"Rope\.scaling is 'yarm'; did you mean 'yarn'\? Choices: factors, linear",
    ),
    (dict(theta=0.0), r'Rope\.theta is 0\.0; it must be a number above 0\.'),
    (dict(scaling='llama3', high_freq_factor=1.0), r'high_freq_factor is 1\.0; it must be above'),
  ),
)
def test_a_bad_rope_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    Rope(**options)


def test_a_layer_with_a_window_has_the_local_rope():
  local = Rope(theta=3.0)
  config = dataclasses.replace(SMALL, windows=(4, 0, 4), local_rope=local)
  assert [config.layer_rope(i) for i in range(3)] == [local, config.rope, local]
  assert SMALL.layer_rope(0) == SMALL.rope
